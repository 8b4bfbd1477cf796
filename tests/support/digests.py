"""Did a refactor move a bit? Runs commands of all kinds on tiny models and keeps digests of what they leave.

    python -m tests.support.digests record before.json   # at the state to compare with
    python -m tests.support.digests check before.json    # at the present one: what differs; exit 1 if anything does

`--only PATTERN` runs the cases whose name matches (and those that they need), `--work DIR` keeps all that they wrote
there, so that two states can be compared file by file. What a clock or a memory meter says is left out, and what stands
on stderr is compared only with `--kinds talk`.

A new case is one entry of `CASES`: its name and its commands, or a function that is given an empty folder. A case may
use what the cases in `needs` have written: its commands run in a folder of its own, beside theirs (`../NAME/...`).
`{bert}` stands for a tiny model of `tests.conftest.FAMILIES`, `{timm-vit}` and `{timm-xcit}` for timm's, `{text}`
and `{pairs}` for sample data.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests import conftest
from tests.support.models.word_models import WORDS, words

# Keys of JSON files whose values come from a clock, from a meter of memory, or from what is installed.
CLOCKS = {"seconds", "step_ms", "throughput", "data_wait", "memory", "started", "finished", "versions", "device"}
CLOCKS |= {"created", "date", "written", "took", "eval_seconds", "windows", "waited", "peak", "spent", "clock"}
TIMES = [
    (re.compile(r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?(?:[+-]\d\d:\d\d|Z)?)?"), "DATE"),
    (re.compile(r"\d[\d.,]* ?(?:ms|s|sec|min|h)\b(?: \d+ ?(?:s|min))?"), "TIME"),
    (re.compile(r"\d[\d.,]* (?:samples|tokens|steps)/s"), "RATE"),
]


HERE = Path(__file__).resolve().parents[2]
KINDS = "tensors,metrics,record,text,bytes"


@dataclass(frozen=True)
class Case:
    """Commands as they are typed, one a line, or a function; and the cases whose results they use."""

    run: str | Callable[[Path], None]
    needs: tuple[str, ...] = ()


def resumed(folder: Path) -> None:
    """Stopped twice, by SIGTERM at a batch and by SIGKILL in a save; EMA, mixup, dropout and checkpoints on the way."""
    from tests.support import training_interrupted as interrupting

    for where, count, number in (("train", 14, interrupting.TERM), ("save", 6, interrupting.KILL)):
        resume = "never" if where == "train" else "auto"
        interrupting.processes(1, interrupting.interrupted, folder, where, count, number, 0, resume, {})
    interrupting.processes(1, interrupting.run, folder, _nothing, "auto")


def two_processes(folder: Path) -> None:
    """The same on two processes, without an interruption and with one."""
    from tests.support import training_interrupted as interrupting

    whole, parted = folder / "whole", folder / "parted"
    for each in (whole, parted):
        each.mkdir()
    interrupting.processes(2, interrupting.run, whole)
    interrupting.processes(2, interrupting.interrupted, parted, "train", 9, interrupting.TERM, 1, "never", {})
    interrupting.processes(2, interrupting.run, parted, _nothing, "auto")


def words_trained(folder: Path) -> None:
    """Uneven counts of scored tokens, accumulation, LAMB, a ramp of the batch, `nan: skip`, early stopping."""
    from tests.support import training_standin as standin

    settings = {
        "micro_batch": 4,
        "optim": {"name": "lamb", "lr": 1e-2},
        "batch_ramp": {"start": 8, "until": 0.5},
        "nan": "skip",
    }
    standin.trained(folder, **settings, early_stopping={"patience": 1}, duration="24st")
    other = folder / "bf16"
    other.mkdir()
    standin.trained(other, precision="bf16", optim={"name": "sgd", "lr": 0.1}, schedule={"name": "constant"})


def _nothing(split: str) -> None:
    pass


def reports(folder: Path) -> None:
    """Every format of the report, on runs whose timings are set."""
    from tests.support.command_line import leansurgeon

    runs = folder.parent / "experiment" / "runs"
    for file in sorted(runs.rglob("summary.json")):
        summary = json.loads(file.read_text())
        fixed = {"seconds": 61.5, "step_ms": 12.25, "throughput": 5224.0, "data_wait": 0.004, "device": "cpu, 1 thread"}
        fixed |= {"memory": {"bytes": 512 << 20, "kind": summary["memory"]["kind"]}}
        fixed |= {"started": "2026-01-01T00:00:00+00:00", "finished": "2026-01-01T00:01:02+00:00"}
        file.write_text(json.dumps(summary | fixed))
    for form in ("table", "markdown", "csv", "json", "latex"):
        (folder / f"report.{form}.txt").write_text(leansurgeon("report", runs, "--format", form).stdout)
    (folder / "wide.txt").write_text(leansurgeon("report", runs, "--wide").stdout)
    (folder / "kappa.txt").write_text(leansurgeon("report", runs, "--kappa").stdout)
    (folder / "html.txt").write_text(leansurgeon("report", runs, "--html", folder / "page.html").stdout)


TINY = "--set train.duration=9st --set train.batch=24 --set train.micro_batch=8 --set train.log_every=2"
TINY += " --set train.eval.every=4st --set train.checkpoint.every=3st --set measure.kappa.samples=8"
DATA = "--samples 24"
LOOK = "--samples 24 --judge-samples 16 --steps 3"

CASES: dict[str, Case] = {
    # exact, and back
    "add-bert": Case("shrink {bert} --heads 2x --head-dim keep --mlp-dim 64 -o out --json\nundo out -o back"),
    "add-gpt2": Case("shrink {gpt2} --heads 6 --head-dim keep -o out\nundo out -o back"),
    "children-llama": Case(
        "shrink {llama} --heads 2x --head-dim keep --more-heads split --no-proof -o out\nundo out -o back"
    ),
    "add-t5": Case("shrink {t5} --heads 8 --head-dim keep --no-proof -o out\nundo out -o back"),
    "add-bart": Case("shrink {bart} --heads 6 --head-dim keep --layers 3,2 --no-proof -o out"),
    "add-timm": Case("shrink {timm-vit} --heads 6 --head-dim keep -o out\nundo out -o back"),
    "add-xcit": Case("shrink {timm-xcit} --heads 2x --class-attention --init fresh-attention --no-proof -o out"),
    # the weights alone
    "drop-qwen3": Case("shrink {qwen3} --layers 2 --mlp-dim 24 --uncalibrated --no-proof -o out"),
    "split-timm": Case("shrink {timm-vit} --heads 8 --layers 2 --uncalibrated --no-proof -o out"),
    "balance-vit": Case("shrink {vit} --balance --no-proof -o out"),
    "keep-roberta": Case("shrink {roberta} --keep 0,2-3 --uncalibrated --no-proof -o out"),
    # on sample data
    "calibrated-vit": Case(
        f"shrink {{vit}} --layers 2 --heads 8 --head-dim keep --calibrate task:digits {DATA} -o out --json"
    ),
    "split-vit": Case(f"shrink {{vit}} --heads 8 --head-dim split --calibrate task:digits {DATA} --no-proof -o out"),
    "calibrated-llama": Case(f"shrink {{llama}} --layers 3 --mlp-dim 24 --calibrate {{text}} {DATA} --no-proof -o out"),
    "split-bert": Case(f"shrink {{bert}} --heads 8 --head-dim split --calibrate {{text}} {DATA} --no-proof -o out"),
    "influence-vit": Case(
        f"shrink {{vit}} --layers 2 --method influence --calibrate task:digits {DATA} -o out --dry-run --json"
    ),
    "angular-timm": Case(
        f"shrink {{timm-vit}} --layers 2 --method angular --calibrate task:digits {DATA} --heal none --no-proof -o out"
    ),
    "layers-t5": Case("shrink {t5} --layers 2,3 --uncalibrated -o out"),
    # heads, kappa, looks
    "prune-vit": Case(f"heads {{vit}} --data task:digits {LOOK} --ablate --prune 50% -o out --json"),
    "prune-bert": Case(f"heads {{bert}} --data {{text}} {LOOK} --prune 25% --no-heal -o out"),
    "prune-t5": Case(f"heads {{t5}} --data {{pairs}} {LOOK} --prune 50% -o out --json"),
    "kappa-vit": Case(
        "kappa {vit} --data task:digits --samples 16 --probes 4 --json\nkappa {timm-vit} --data task:digits"
    ),
    "looks": Case(
        "inspect {llama} --json\ninspect {bert}\nplan vit-b --heads 16 --layers 7 --json\n"
        "diff {bert} ../add-bert/out\ndiff {bert} ../add-bert/out --json\nrecipes list\nrecipes show digits-vit",
        ("add-bert",),
    ),
    # trainings
    "train": Case(
        f"shrink digits-vit --heads 8 --layers 3 --mlp-dim 128 --init fresh --no-proof\n"
        f"retrain -o run {TINY} --set train.ema.decay=0.9 --set train.mixup=0.4 --json\n"
        f"retrain run -r digits-vit --eval-only --json\nretrain -r digits-vit {TINY} --dry-run"
    ),
    "distil": Case(
        "shrink ../train/run --layers 2 --heads 2x --uncalibrated --no-proof -o out\n"
        f"retrain out -r digits-vit -o run {TINY} --set train.distill.teacher=source --set train.distill.hidden=0.5\n"
        f"retrain out -r digits-vit -o workers {TINY} --set train.workers=1 --limit-batches 3",
        ("train",),
    ),
    "resume": Case(resumed),
    "two-processes": Case(two_processes),
    "words": Case(words_trained),
    "causal": Case(
        "retrain {llama} -r austen-gpt -o run --limit-batches 2 --set train.duration=4st --set task.data={text} "
        "--set task.tokenizer={llama} --set task.seq_len=16 --set task.vocab_size=61 --set train.batch=8 "
        "--set train.eval.batch=8 --set train.checkpoint.keep_best=false"
    ),
    "experiment": Case("run digits-vit --debug --parallel 2 --json"),
    "reports": Case(reports, ("experiment",)),
    "search": Case(
        f"search ../train/run --params 100k --heads 4,8 --layers 2,3 --mlp-dim 64 --tries 2 {DATA} --json", ("train",)
    ),
}


def sources(names: set[str], place: Path) -> dict[str, Path]:
    """The tiny models and sample data that the commands name."""
    import numpy as np

    made = {}
    for name in sorted(names):
        made[name] = place / name
        if name in conftest.FAMILIES:
            conftest.build(name).save_pretrained(made[name])
            if name != "vit":
                words(made[name], "<extra_id_7>" if name in ("bert", "roberta") else None)
        elif name.startswith("timm-"):
            _timm(name, made[name])
        elif name in ("text", "pairs"):
            rng = np.random.default_rng(0)
            lines = [" ".join(rng.choice(WORDS, rng.integers(8, 31))) for _ in range(160)]
            if name == "pairs":
                lines = [f"{line}\t{' '.join(line.split()[:4])}" for line in lines]
            made[name] = made[name].with_suffix(".tsv" if name == "pairs" else ".txt")
            made[name].write_text("\n".join(lines))
        else:
            raise ValueError(f"No source '{name}' is known here.")
    return made


_TIMM = {
    "timm-vit": (
        "vit_tiny_patch16_224",
        dict(img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=48, depth=4, num_heads=4, mlp_ratio=2),
    ),
    "timm-xcit": (
        "xcit_nano_12_p16_224",
        dict(img_size=32, patch_size=16, num_classes=5, embed_dim=32, depth=3, num_heads=4, cls_attn_layers=2, eta=1.0),
    ),
}


def _timm(name: str, folder: Path) -> None:
    import timm
    import torch
    from safetensors.torch import save_file

    architecture, args = _TIMM[name]
    torch.manual_seed(0)
    model = timm.create_model(architecture, **args)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    size = [args.get("in_chans", 3), args["img_size"], args["img_size"]]
    known = {"input_size": size, "fixed_input_size": True, "num_classes": args["num_classes"], "crop_pct": 0.9}
    known |= {"interpolation": "bicubic", "mean": [0.5] * size[0], "std": [0.5] * size[0]}
    config = {"architecture": architecture, "num_classes": args["num_classes"], "num_features": args["embed_dim"]}
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"model_args": args, "pretrained_cfg": known}))


def run_case(case: Case, folder: Path, made: dict[str, Path]) -> None:
    """The body of a process of its own: what a command leaves in memory reaches no other case."""
    import torch

    torch.set_num_threads(1)
    os.chdir(folder)
    os.environ["LEANSURGEON_CACHE"] = str(folder.parent / "cache")
    os.environ["PYTHONPATH"] = str(HERE)  # processes that are started import what this one did
    try:
        if callable(case.run):
            case.run(folder)
            return
        from tests.support.command_line import leansurgeon

        for number, line in enumerate(case.run.splitlines()):
            arguments = line.format(**made).split()
            done = leansurgeon(*arguments)
            (folder / f"said-{number}.txt").write_text(f"{' '.join(arguments)}\n{done.returncode}\n{done.stdout}")
            (folder / f"talk-{number}.txt").write_text(done.stderr)
    except BaseException:
        (folder / "said-failed.txt").write_text(traceback.format_exc())
        sys.exit(1)


def digest_of(file: Path, place: Path) -> tuple[str, str]:
    """What kind of thing a file is (tensors, metrics, record, text), and its digest."""
    if file.suffix in (".safetensors", ".pt"):
        return "tensors", _tensors(file)
    if file.suffix == ".jsonl":
        rows = [_plain(json.loads(line), place) for line in file.read_text().splitlines()]
        return "metrics", _sha(json.dumps(rows, sort_keys=True))
    if file.suffix == ".json":
        kind = "metrics" if file.name in ("summary.json", "kappa.json", "heads.json") else "record"
        return kind, _sha(json.dumps(_plain(json.loads(file.read_text()), place), sort_keys=True))
    if file.name.startswith("talk-"):
        return "talk", _sha(_said(file.read_text(), place))
    try:
        text = file.read_text()
    except UnicodeDecodeError:
        return "bytes", hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    return "text", _sha(_said(text, place))


def _tensors(file: Path) -> str:
    import torch
    from safetensors.torch import load_file

    tensors = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
    said = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        said.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        said.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return said.hexdigest()[:16]


def _plain(value: object, place: Path) -> object:
    """JSON without what clocks say, and without the name of this folder."""
    if isinstance(value, dict):
        return {key: _plain(inner, place) for key, inner in value.items() if key not in CLOCKS}
    if isinstance(value, list):
        return [_plain(inner, place) for inner in value if not _by_chance(inner)]
    return _said(value, place) if isinstance(value, str) else value


def _by_chance(value: object) -> bool:
    """A note that is there or not as the trainings of an experiment happened to meet."""
    return isinstance(value, str) and "side by side" in value


def _said(text: str, place: Path) -> str:
    found = []
    for line in text.replace(str(place), "PLACE").splitlines():
        if line.startswith("{"):  # a document on stdout
            with suppress(ValueError):
                line = json.dumps(_plain(json.loads(line), place), sort_keys=True)
        for pattern, word in TIMES:
            line = pattern.sub(word, line)
        found.append(line)
    return "\n".join(found)


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def wanted(pattern: str) -> dict[str, Case]:
    """The cases whose name matches, and those that they need, in their order."""
    names = {name for name in CASES if fnmatch.fnmatch(name, pattern)}
    while more := {need for name in names for need in CASES[name].needs} - names:
        names |= more
    return {name: case for name, case in CASES.items() if name in names}


def record(work: Path, pattern: str = "*") -> dict[str, dict[str, list[str]]]:
    """Run the cases below `work`: name of a case -> file -> (kind, digest)."""
    cases = wanted(pattern)
    named = {
        word for case in cases.values() if isinstance(case.run, str) for word in re.findall(r"{([\w-]+)}", case.run)
    }
    (work / "sources").mkdir(parents=True)
    made = sources(named, work / "sources")
    import leansurgeon.training.loop  # noqa: F401  (once for every forked process)

    found = {}
    for name, case in cases.items():
        folder, began = work / name, time.perf_counter()
        folder.mkdir()
        process = multiprocessing.get_context("fork").Process(target=run_case, args=(case, folder, made))
        process.start()
        process.join()
        took = time.perf_counter() - began
        print(f"{name:18} {took:5.1f} s{'' if process.exitcode == 0 else '  FAILED'}", file=sys.stderr, flush=True)
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        found[name] = {str(file.relative_to(folder)): list(digest_of(file, work)) for file in files}
    return found


def differing(before: dict, after: dict, kinds: set[str]) -> list[str]:
    """One line for every file of a case that differs, is missing or is new; cases of one side only are left out."""
    lines = []
    for case in before.keys() & after.keys():
        old, new = before[case], after[case]
        for file in old.keys() | new.keys():
            if (old.get(file) or new[file])[0] not in kinds:
                continue
            if file not in new or file not in old:
                lines.append(f"{case}/{file}: {'gone' if file not in new else 'new'}")
            elif old[file] != new[file]:
                lines.append(f"{case}/{file}: another {new[file][0]}")
    return sorted(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "check"])
    parser.add_argument("file", type=Path, help="The digests to write, or to compare with.")
    parser.add_argument("--only", default="*", help="Cases whose name matches this pattern.")
    parser.add_argument("--work", type=Path, help="A folder that must not exist yet; what was written stays there.")
    parser.add_argument("--kinds", default=KINDS, help=f"What is compared (default: {KINDS}); talk is on stderr.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = record((given.work or Path(scratch) / "work").resolve(), given.only)
    if given.what == "record":
        given.file.write_text(json.dumps(found, indent=1))
        return 0
    lines = differing(json.loads(given.file.read_text()), found, set(given.kinds.split(",")))
    print("\n".join(lines) or "Nothing differs.")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
