"""What is done with malformed files: one case is one damaged input and one command that is given it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.support import malformed as m

FAMILIES = (
    "bert",
    "gpt2",
    "vit",
    "llama",
    "t5",
    "modernbert",
    "dinov2",
    "nystromformer",
    "electra",
    "clip_vision_model",
)
TIMM = {
    "vit_tiny_patch16_224": {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2},
    "cait_xxs24_224": {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2},
}
SHRINK = ("--no-proof", "--uncalibrated", "--force")
KEYS = [
    "train.duration", "train.batch", "train.optim.lr", "train.optim.betas", "train.precision", "task", "task.name",
    "seeds", "train", "train.eval.every", "train.checkpoint.every", "measure.kappa.samples", "model", "arms",
    "train.schedule.warmup", "x", "a.b.c", ".", "=", "version", "task.seq_len", "train.seed", "train.workers",
    "train.mixup", "train.trackers",
]  # fmt: skip
RECIPES = ("digits-vit", "austen-gpt", "listops-small", "d-retrieval")
NAMES = [word for word in m.WORDS if "\0" not in word and word != "hub:a/b"]
NAMES += ["y" * 300, "a" * 255 + "/b", "\udcff"]
NUMBERS = ["0", "-1", "9" * 400, "1e9", "x", "nan", "inf", "2x", "1,2,3", "", "1/0x", "0x", "-2x", "1e999x"]
TEXT = " ".join(f"w{i % 50}" for i in range(6000))


@dataclass(frozen=True)
class Bases:
    """Whole things to damage, all small, below one folder."""

    root: Path

    @property
    def models(self) -> list[Path]:
        return sorted((self.root / "models").iterdir())

    def copy(self, what: Path, to: Path) -> Path:
        """A copy to damage."""
        target = to / what.name
        shutil.copytree(what, target, symlinks=True)
        return target


def build(root: Path) -> Bases:
    """Make everything that cases damage."""
    import torch
    from safetensors.torch import load_file, save_file

    from leansurgeon.checkpoints.model import create_timm
    from tests import conftest
    from tests.support.command_line import leansurgeon
    from tests.support.models.word_models import words
    from tests.support.report.report_workspace import workspace

    for family in FAMILIES:
        conftest.build(family).save_pretrained(root / "models" / family)
    for family in ("bert", "gpt2", "llama"):
        words(root / "models" / family)
    for name, args in TIMM.items():
        folder = root / "models" / name
        folder.mkdir()
        model = create_timm(name, **args, num_classes=10)
        save_file({k: v.contiguous() for k, v in model.state_dict().items()}, folder / "model.safetensors")
        config = {"architecture": name, "num_classes": 10, "model_args": args, "pretrained_cfg": {"mean": [0.5] * 3}}
        (folder / "config.json").write_text(json.dumps(config))
    vision = {"do_normalize": True, "image_mean": [0.5], "image_std": [0.5], "size": {"height": 8, "width": 8}}
    (root / "models/vit/preprocessor_config.json").write_text(json.dumps(vision))
    conftest.build("llama").save_pretrained(root / "sharded", max_shard_size="20KB")
    (root / "pickled").mkdir()
    shutil.copy(root / "models/bert/config.json", root / "pickled")
    torch.save(load_file(root / "models/bert/model.safetensors"), root / "pickled/pytorch_model.bin")
    for model in ("llama", "vit"):
        done = leansurgeon("shrink", root / "models" / model, "--heads", 8, *SHRINK, "-o", root / "results" / model)
        assert done.returncode == 0, done.stderr
    workspace(root / "runs")
    shutil.copytree(root / "models/vit", root / "runs/digits-vit/lean-s0/model")
    (root / "data").mkdir()
    tables(root / "data")
    return Bases(root)


def warm(bases: Bases) -> None:
    """Import what commands import, once for all processes."""
    from tests.support.command_line import leansurgeon

    vit, gpt2 = bases.root / "models/vit", bases.root / "models/gpt2"
    for words in (
        ("retrain", vit, "-r", "digits-vit", "--dry-run"),
        ("plan", vit, "--heads", "8", "--memory"),
        ("kappa", gpt2, "--data", bases.root / "data/text.txt", "--samples", 4, "--probes", 0),
        ("report", bases.root / "runs"),  # a page draws with threads, which no fork survives
        ("search", vit, "--params", "1M", "--dry-run"),
        ("undo", bases.root / "results/vit", "-o", bases.root / "back", "--dry-run"),
    ):
        done = leansurgeon(*words)
        assert done.returncode == 0, (words, done.stderr)


def tables(folder: Path) -> None:
    """Data files of every kind."""
    import pyarrow
    from PIL import Image
    from pyarrow import parquet

    rows = [{"text": f"w{i} w{i + 1} w3", "label": i % 2} for i in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rows.csv").write_text("text,label\n" + "".join(f"{r['text']},{r['label']}\n" for r in rows))
    (folder / "rows.tsv").write_text("text\tlabel\n" + "".join(f"{r['text']}\t{r['label']}\n" for r in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    (folder / "text.txt").write_text(TEXT)
    for number in range(8):
        place = folder / "images" / f"class{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        suffix = ("png", "jpg", "gif", "bmp")[number // 2]
        Image.new("L", (8, 8), number * 20).save(place / f"{number}.{suffix}")


Do = Callable[[], int]  # gives an exit code


@dataclass(frozen=True)
class Case:
    """What was damaged, what is done with it, and how to do it."""

    what: str
    command: tuple[str, ...]
    do: Do


def command(*arguments: object) -> tuple[tuple[str, ...], Do]:
    """A command line, in this process; its exit code."""
    words = tuple(map(str, arguments))

    def do() -> int:
        from tests.support.command_line import leansurgeon

        done = leansurgeon(*words)
        check_talk(done.returncode, done.stderr)
        return done.returncode

    return words, do


def check_talk(code: int, talk: str) -> None:
    """What is said of an error is short, and is no traceback."""
    assert "Traceback" not in talk, talk[-2000:]
    said = [line for line in talk.splitlines() if line.startswith("leansurgeon: ")]
    assert code in (0, 2) or said or "WRONG" in talk or code == 3, f"exit {code} without a word: {talk[-500:]}"
    assert all(len(line) <= 2500 for line in said), f"{max(map(len, said))} columns"


def one_of(rng: Random, *commands: tuple) -> tuple[tuple[str, ...], Do]:
    """One of these command lines."""
    return command(*rng.choice(commands))


def of_a_model(rng: Random, folder: Path, scratch: Path, *, heavy: float = 0.04) -> tuple[tuple[str, ...], Do]:
    """A command that opens the model in `folder`; a `heavy` one runs it, too."""
    out = (*SHRINK, "-o", scratch / "out")
    if rng.random() < heavy:
        data = "task:digits" if "vit" in folder.name else str(scratch / "text.txt")
        (scratch / "text.txt").write_text(TEXT)
        few = ("--data", data, "--samples", 4)
        return one_of(
            rng,
            ("kappa", folder, *few, "--probes", 0),
            ("heads", folder, *few, "--judge-samples", 4, "--no-curve"),
            ("retrain", folder, "--recipe", "digits-vit", "--dry-run"),
            ("shrink", folder, "--heads", "2x", "--calibrate", data, *out),
        )
    return one_of(
        rng,
        ("inspect", folder),
        ("inspect", folder, "--data", ""),
        ("plan", folder, "--heads", "2x"),
        ("plan", folder, "--layers", "1", "--memory"),
        ("shrink", folder, "--heads", "2x", "--dry-run"),
        ("shrink", folder, "--layers", "1", *out),
        ("shrink", folder, "--heads", "8", "--head-dim", "keep", *out),
        ("shrink", folder, "--heads", "8", "--init", "fresh", *out),
        ("diff", folder, folder),
        ("undo", folder, "-o", scratch / "back", "--dry-run"),
        ("search", folder, "--params", "1M", "--dry-run"),
        ("report", folder),
    )


# -- subjects --------------------------------------------------------------------------------------


def config(rng: Random, bases: Bases, scratch: Path) -> Case:
    folder = bases.copy(rng.choice(bases.models), scratch)
    what = m.damage_json(rng, folder / "config.json", m.HIDDEN)
    return Case(f"{folder.name}/{what}", *of_a_model(rng, folder, scratch))


def weights(rng: Random, bases: Bases, scratch: Path) -> Case:
    folder = bases.copy(rng.choice(bases.models), scratch)
    what = m.damage_safetensors(rng, folder / "model.safetensors")
    return Case(f"{folder.name}/{what}", *of_a_model(rng, folder, scratch))


def shards(rng: Random, bases: Bases, scratch: Path) -> Case:
    folder = bases.copy(bases.root / "sharded", scratch)
    if rng.random() < 0.7:
        what = m.damage_json(rng, folder / "model.safetensors.index.json")
    else:
        what = m.damage_safetensors(rng, rng.choice(sorted(folder.glob("*.safetensors"))))
    return Case(what, *of_a_model(rng, folder, scratch))


def record(rng: Random, bases: Bases, scratch: Path) -> Case:
    folder = bases.copy(bases.root / "results" / rng.choice(["llama", "vit"]), scratch)
    what = m.damage_json(rng, folder / "surgery.json")
    if rng.random() < 0.5:
        return Case(what, *of_a_model(rng, folder, scratch, heavy=0.1))
    done = one_of(
        rng,
        ("undo", folder, "-o", scratch / "back", "--dry-run"),
        ("undo", folder, "-o", scratch / "back", "--json"),
        ("report", folder, "--html", scratch / "page.html"),
        ("shrink", folder, "--layers", 2, *SHRINK, "-o", folder),
        ("retrain", folder, "--recipe", "digits-vit", "--dry-run"),
    )
    return Case(what, *done)


def beside(rng: Random, bases: Bases, scratch: Path) -> Case:
    """Tokenizer and processor files."""
    folder = bases.copy(bases.root / "models" / rng.choice(["bert", "gpt2", "llama", "vit"]), scratch)
    names = ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "generation_config.json")
    file = rng.choice([folder / name for name in names if (folder / name).is_file()])
    what = m.damage_json(rng, file)
    return Case(f"{folder.name}/{what}", *of_a_model(rng, folder, scratch, heavy=0.2))


def results(rng: Random, bases: Bases, scratch: Path) -> Case:
    """What runs leave."""
    runs = bases.copy(bases.root / "runs", scratch)
    run = runs / "digits-vit/lean-s0"
    file = run / rng.choice(["summary.json"] * 4 + ["metrics.jsonl", "metrics.jsonl", "heads.json", "bench.json"])
    what = (m.damage_lines if file.suffix == ".jsonl" else m.damage_json)(rng, file)
    page = ("--html", scratch / "page.html") if rng.random() < 0.25 else ()
    done = one_of(
        rng,
        ("report", run, "--wide"),
        ("report", runs, "--kappa"),
        ("report", runs, "--format", rng.choice(["csv", "json", "latex", "markdown"])),
        ("report", runs, *page),
        ("inspect", run),
    )
    return Case(what, *done)


def recipe(rng: Random, bases: Bases, scratch: Path) -> Case:
    from leansurgeon.reading import yamlfile
    from leansurgeon.training.recipe import reading

    whole = yamlfile.read(reading.list_shipped()[rng.choice(RECIPES)])[0]
    text, what = m.yaml_text(rng, whole)
    file = scratch / "recipe.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    model = bases.root / "models/vit"
    done = one_of(
        rng,
        ("recipes", "show", file, "--resolved"),
        ("recipes", "copy", file, scratch / "copy.yaml"),
        ("retrain", model, "--recipe", file, "--dry-run"),
        ("retrain", model, "--recipe", file, "--dry-run", "--set", "train.batch=8"),
    )
    return Case(what, *done)


def settings(rng: Random, bases: Bases, scratch: Path) -> Case:
    """Values of `--set`."""
    value = json.dumps(m.junk(rng)) if rng.random() < 0.5 else str(m.yaml_text(rng, {"a": 1})[0])
    word = f"{rng.choice(KEYS)}={value[:50_000]}"
    recipe = rng.choice(["digits-vit", "austen-gpt"])
    return Case(m.short(word), *command("retrain", bases.root / "models/vit", "-r", recipe, "--dry-run", "--set", word))


def pickled(rng: Random, bases: Bases, scratch: Path) -> Case:
    folder = bases.copy(bases.root / "pickled", scratch)
    what = m.damage_pickle(rng, folder / "pytorch_model.bin")
    if rng.random() < 0.1:
        (folder / "pytorch_model.bin").rename(folder / "x.pth")
    words = rng.choice([("inspect", folder), ("plan", folder, "--heads", "8"), ("diff", folder, folder)])
    return Case(what, *command(*words, *(["--allow-pickle"] if rng.random() < 0.9 else [])))


def data(rng: Random, bases: Bases, scratch: Path) -> Case:
    """Tables, texts and images, as a task reads them."""
    folder = bases.copy(bases.root / "data", scratch)
    name = rng.choice(["rows.jsonl", "rows.csv", "rows.tsv", "rows.parquet", "text.txt", "images"])
    path = folder / name
    if name == "images":
        picture = rng.choice(sorted(p for p in path.rglob("*") if p.is_file()))
        if rng.random() < 0.3:
            what = m.replace_by_other(rng, picture)
        elif rng.random() < 0.2:
            (path / "class0" / "loop").symlink_to(rng.choice(["..", ".", "loop", "../class1", "/"]))
            what = "a loop of links"
        else:
            what = m.damage_bytes(rng, picture)
    elif rng.random() < 0.15:
        what = m.replace_by_other(rng, path)
    elif name == "rows.jsonl" and rng.random() < 0.7:
        what = m.damage_lines(rng, path)
    else:
        what = m.damage_bytes(rng, path)
    task, options = ("folder", {"data": str(path), "image_size": 8, "channels": 1})
    if name != "images":
        task, options = ("text-classification", {"train": str(path), "tokenizer": "byte"})
    if name == "text.txt":
        task, options = ("causal-lm", {"data": str(path), "tokenizer": "byte", "seq_len": 16})
    return Case(what, (task, str(options)), lambda: prepared(task, options, scratch / "cache"))


def prepared(task: str, options: dict, cache: Path) -> int:
    """Prepare a task and draw batches; the exit code of what it raises."""
    import numpy as np

    from leansurgeon import tasks
    from leansurgeon.errors import LeanSurgeonError

    try:
        made = tasks.make(task, options)
        made.prepare(cache, None, workers=1, say=lambda _: None)
        for split in ("train", "eval"):
            made.batch(split, np.arange(min(16, made.size(split))), seed=0, epoch=0)
    except LeanSurgeonError as error:
        check_talk(error.exit_code, f"leansurgeon: {error}")
        return error.exit_code
    return 0


def arguments(rng: Random, bases: Bases, scratch: Path) -> Case:
    """Names and numbers on the command line."""
    word, number = rng.choice(NAMES), rng.choice(NUMBERS)
    model = bases.root / "models" / rng.choice(["llama", "vit", "bert"])
    out = scratch / word.lstrip("/")
    done = one_of(
        rng,
        ("inspect", word),
        ("plan", word, "--heads", number),
        ("plan", model, "--heads", number, "--layers", rng.choice(["1", number])),
        ("plan", model, "--mlp-dim", number, "--memory", "--batch", "8"),
        ("plan", model, "--head-dim", number, "--heads", "8"),
        ("shrink", model, "--layers", number, "--dry-run"),
        ("shrink", model, "--layers", "2", "--keep", number, "--dry-run"),
        ("shrink", model, "--layers", "2", "--method", word, "--dry-run"),
        ("shrink", model, "--layers", "2", *SHRINK, "-o", out),
        ("shrink", model, "--layers", "2", "--calibrate", word, "--dry-run"),
        ("diff", word, model),
        ("undo", word, "-o", scratch / "x"),
        ("report", word),
        ("report", "--workspace", word),
        ("heads", model, "--data", word),
        ("kappa", model, "--data", f"task:{word}"),
        ("kappa", model, "--data", f"task:digits,{word}={number}"),
        ("retrain", model, "--recipe", word, "--dry-run"),
        ("retrain", model, "--data", word, "--time", number, "--dry-run"),
        ("retrain", model, "-r", "digits-vit", "--resume", word, "--dry-run"),
        ("recipes", "show", word),
        ("recipes", "copy", "digits-vit", out),
        ("run", word),
        ("search", model, "--params", number, "--dry-run"),
        ("search", "digits-vit", "--params", "1M", "--heads", number, "--dry-run"),
    )
    return Case("arguments", *done)


def kinds(rng: Random, bases: Bases, scratch: Path) -> Case:
    """Folders, pipes, devices, loops in the place of files."""
    folder = bases.copy(
        rng.choice([*bases.models, bases.root / "sharded", bases.root / "results/vit", bases.root / "runs"]), scratch
    )
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    what = m.replace_by_other(rng, rng.choice(files))
    if folder.name == "runs":
        return Case(what, *command("report", folder, *rng.choice([(), ("--html", scratch / "x.html"), ("--kappa",)])))
    return Case(what, *of_a_model(rng, folder, scratch))


SUBJECTS: dict[Callable[[Random, Bases, Path], Case], int] = {
    config: 26,
    weights: 10,
    shards: 5,
    record: 9,
    beside: 4,
    results: 10,
    recipe: 8,
    settings: 6,
    pickled: 4,
    data: 8,
    arguments: 6,
    kinds: 7,
}


def case(seed: int, number: int, bases: Bases, scratch: Path) -> tuple[str, Case]:
    """The kind of case `number` of the run with `seed`, and the case, its files made in `scratch`."""
    rng = Random(f"{seed}:{number}")
    subject = rng.choices(list(SUBJECTS), weights=list(SUBJECTS.values()))[0]
    return subject.__name__, subject(rng, bases, scratch)
