"""`leansurgeon shrink`: rewrite a model to more heads and fewer layers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leansurgeon.cli.common import AllowPickle, TrustRemoteCode, hold, say
from leansurgeon.errors import UsageError
from leansurgeon.words import wrap

if TYPE_CHECKING:
    from leansurgeon.checkpoints.record import Proof, SurgeryRecord


def shrink(
    source: Annotated[str, typer.Argument(help="Preset, folder, run, hub id or timm/NAME.", show_default=False)],
    heads: Annotated[
        str | None, typer.Option(help="24, 2x, or one per stage: 16,32,32,32.", show_default=False)
    ] = None,
    layers: Annotated[str | None, typer.Option(help="10, or one per stage: 4,4,8,2.", show_default=False)] = None,
    params: Annotated[
        str | None,
        typer.Option(
            help="-30%, 70% or 60M: as many parameters; the shape is chosen, and why is said.", show_default=False
        ),
    ] = None,
    head_dim: Annotated[
        str,
        typer.Option(help="keep: inner width grows. split: width // heads. Or a number. auto chooses and says why."),
    ] = "auto",
    mlp_dim: Annotated[str | None, typer.Option(help="Width of the MLP.", show_default=False)] = None,
    mlp_ratio: Annotated[
        str | None, typer.Option(help="MLP width as a multiple of width: 2, or one per stage.", show_default=False)
    ] = None,
    class_attention: Annotated[
        bool, typer.Option("--class-attention", help="Class attention (XCiT, CaiT) gets the same heads; else it stays.")
    ] = False,
    init: Annotated[
        str, typer.Option(help="transfer keeps what can be kept; fresh is the paper's way; or fresh-attention.")
    ] = "transfer",
    calibrate: Annotated[
        str | None,
        typer.Option(
            help="Sample data that chooses and heals: text files, a folder of images, or task:NAME,key=value. "
            "Default: the data that a run was trained on.",
            show_default=False,
        ),
    ] = None,
    calibration_samples: Annotated[
        int | None, typer.Option(min=2, help="Samples to fit on; a quarter as many guard.", show_default=False)
    ] = None,
    uncalibrated: Annotated[
        bool, typer.Option("--uncalibrated", help="Use the weights alone, also where that is much worse.")
    ] = False,
    method: Annotated[
        str, typer.Option(help="Layers by auto, even, last-of-each, influence, angular, leave-one-out, greedy or fuse.")
    ] = "auto",
    keep: Annotated[
        str | None, typer.Option(help="The layers that stay: 0,2,4-9 (from 0).", show_default=False)
    ] = None,
    more_heads: Annotated[str, typer.Option(help="add: silent new heads. split: children of the old ones.")] = "add",
    heal: Annotated[bool, typer.Option("--heal/--no-heal", help="Refit output projections on sample data.")] = True,
    fit: Annotated[int, typer.Option(help="Local fitting steps for every changed layer, such as 150.")] = 0,
    balance: Annotated[
        bool, typer.Option("--balance", help="Even out values and outputs by an exact change of basis.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also score a fresh and a naive start of the same shape.")
    ] = False,
    judge: Annotated[
        str | None,
        typer.Option(help="Also judge the result on other data than it was calibrated on.", show_default=False),
    ] = None,
    proof: Annotated[bool, typer.Option("--proof/--no-proof", help="Reload the result and compare it.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of everything that is drawn.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder to write. Default: WORKSPACE/NAME-h24-l10.", show_default=False),
    ] = None,
    workspace: Annotated[Path, typer.Option(help="Where models and runs live.")] = Path("runs"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing output folder.")] = False,
    allow_pickle: AllowPickle = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Rewrite SOURCE to more heads and fewer layers, keep what can be kept, and prove that the result loads."""
    from leansurgeon.checkpoints import digests

    if not dry_run:
        digests.begin(source)
    from leansurgeon.checkpoints.output import check_apart
    from leansurgeon.checkpoints.report_numbers import sentence
    from leansurgeon.checkpoints.source import open_source
    from leansurgeon.report.tables.decided import table as decided_table
    from leansurgeon.report.tables.plan import plan_table
    from leansurgeon.surgery.plan.method import Method
    from leansurgeon.surgery.plan.planning import plan
    from leansurgeon.surgery.plan.wanted import Wanted
    from leansurgeon.surgery.shrink import carry_out, decide

    wanted = Wanted(heads, layers, head_dim, mlp_dim, mlp_ratio, init, class_attention)
    wanted.check()
    how = Method(method, keep, more_heads, heal, fit, balance, uncalibrated)
    task = None if calibrate or uncalibrated or init == "fresh" else trained_on(source)
    has_data = bool(calibrate or task)
    how.check(has_data)
    if compare and not (has_data and proof):
        raise UsageError("--compare scores on held-out data.", "Add --calibrate DATA and leave --no-proof out.")
    if (judge and not (proof and has_data)) or (judge and dry_run):
        raise UsageError("--judge judges a result that sample data has made.", "Add --calibrate DATA.")
    opened = open_source(source, allow_pickle=allow_pickle, weights=init != "fresh")
    data = None
    if params:
        from leansurgeon.search.choose import by_parameters

        if has_data and opened.learned and init != "fresh":
            data = sample_data(opened, calibrate, task, calibration_samples, seed)
        chosen = by_parameters(opened, params, wanted, data, seed, say)
        wanted = chosen.wanted
        for sentence_of_choice in chosen.says:
            say(sentence_of_choice)
    steps = plan(opened, wanted, seed, how, calibrated=has_data)
    folder = out or workspace / default_name(opened.slug, steps)
    if steps.before == steps.after and init == "transfer" and not (balance or class_attention or head_dim != "auto"):
        question(opened.name, as_json)
    if compare:
        from leansurgeon.surgery.check import compare as comparison

        comparison.refuse_unlearned(opened, wanted)
    if has_data and steps.init == "fresh":
        say(f"The sample data is not used: nothing of {opened.name} is kept.")
    if not dry_run:
        hold(folder, force=force)
        check_apart(folder, opened.folder)
    used = has_data and opened.learned and steps.init != "fresh"
    data = (data or sample_data(opened, calibrate, task, calibration_samples, seed)) if used else None
    decided = decide(opened, wanted, seed, how, data, say)
    steps = decided.plan
    if dry_run:
        decided.close()
    also = (lambda found: comparison.starts(opened, wanted, steps, data, found.compared, say)) if compare else None
    record = (
        None
        if dry_run
        else carry_out(decided, opened, folder, force=force, check=proof, keep_unproved=True, starts=also, say=say)
    )
    if judge and record and used:
        record = judged_on(judge, opened, folder, record, seed)
    found = record.proof if record else None
    if as_json:
        document = {
            "schema_version": 1,
            "dry_run": dry_run,
            "out": None if dry_run else str(folder),
            "plan": steps.as_dict(),
            "decided": decided.record,
        }
        document |= {"proof": found and found.as_dict()} if record else {}
        starts = record.starts if record else {}
        document |= {"compare": {name: start.as_dict() for name, start in starts.items()}} if starts else {}
        print(json.dumps(document))
        return
    print(plan_table(steps))
    if choices := decided_table(record.decided if record else decided.record):
        print("\n" + choices)
    if record is None:
        print("\nDry run: nothing was written.")
        return
    print(
        closing(folder, found)
        if found
        else "\n".join(["", *wrap(f"Written to {folder}; neither reloaded nor checked for NaN.")])
    )
    if found and opened.learned and init != "fresh":
        print("\n".join(wrap(sentence(found.compared, record.language))))
        if data is not None and found.compared and found.compared.done:
            other = "" if record.judged else "; --judge DATA judges on others"
            print("\n".join(wrap(f"These outputs are of the same data that was calibrated on ({data.name}){other}.")))
    for name, compared in record.judged.items():
        print("\n".join(wrap(f"{name}, which had no part in the making: {sentence(compared, record.language)}")))
    if record.starts:
        print("\n" + comparison.table(record.starts, data))


def question(name: str, as_json: bool) -> None:
    """Ask whether a copy is meant where nothing was asked for; where nobody sits before it, say so and go on. Raises
    `UsageError` for a no.
    """
    hint = "Say what to change: --heads 2x, --layers 6, --mlp-dim 512 or --params -30%."
    told = f"Nothing is to be changed, so this writes {name} as it is."
    if sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty() and not as_json:
        if not typer.confirm(f"{told} Go on?", default=False, err=True):
            raise UsageError("Nothing was written.", hint)
        return
    say(f"{told} {hint}")


def judged_on(name: str, opened, folder: Path, made: SurgeryRecord, seed: int) -> SurgeryRecord:
    """The record with the result's outputs on data that had no part in the making, written into its folder."""
    from dataclasses import replace

    from leansurgeon.checkpoints import record
    from leansurgeon.checkpoints.prove import prove
    from leansurgeon.surgery.shrink import predicts_words

    other = sample_data(opened, name, None, None, seed)
    causal = predicts_words(other) and other.task.head == "causal-lm"
    batches, kind = [*other.guard, *other.heldout], "causal-lm" if causal else "plain"
    say(f"Judging on {name} ...")
    account = prove(folder, made.proof.parameters, source=opened.folder, batches=batches, kind=kind)
    return record.write(folder, replace(made, judged={**made.judged, name: account.compared}))


def trained_on(source: str):
    """The task of the run that left this model, as its recipe says; None where there is none."""
    folder = Path(source).expanduser()
    recipes = [place / "recipe.yaml" for place in (folder, folder.parent) if (place / "recipe.yaml").is_file()]
    if not recipes or not ((folder / "config.json").exists() or (folder / "model" / "config.json").exists()):
        return None
    from leansurgeon.training.recipe.reading import load

    return load(str(recipes[0])).task


def sample_data(opened, calibrate: str | None, task, samples: int | None, seed: int):
    """What `--calibrate` names, or the data of the run."""
    from leansurgeon.measure.data import calibration
    from leansurgeon.training.runs.folder import cache_dir

    if calibrate:
        return calibration.open_calibration(calibrate, opened, cache=cache_dir(), samples=samples, seed=seed, say=say)
    say(f"Sample data: task {task.name}, as in the run's recipe (--uncalibrated does without).")
    return calibration.from_task(
        task.name, task.options, opened, cache=cache_dir(), samples=samples, seed=seed, say=say
    )


def closing(folder: Path, proof: Proof) -> str:
    lines = wrap(f"Written to {folder}; reloaded in a fresh process with {proof.loaded_with}:")
    lines += wrap(
        f"{proof.parameters:,} parameters, no missing and no unexpected tensors, output {list(proof.output)} is finite."
    )
    return "\n".join(["", *lines])


def default_name(slug: str, steps) -> str:
    shape = steps.after
    return f"{slug}-h{shape.column('heads')}-l{shape.column('depth')}"
