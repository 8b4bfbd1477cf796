"""`leansurgeon shrink`: rewrite a model to more heads and fewer layers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leansurgeon.cli.common import AllowPickle, TrustRemoteCode, WhichTower, hold, say
from leansurgeon.errors import UsageError
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.training.runs.sample_data import sample_data, trained_on
from leansurgeon.words import wrap

if TYPE_CHECKING:
    from leansurgeon.checkpoints.record import Comparison, Proof, SurgeryRecord
    from leansurgeon.checkpoints.source import Source
    from leansurgeon.measure.data.calibration import Calibration
    from leansurgeon.surgery.plan.planning import Plan
    from leansurgeon.surgery.plan.wanted import Wanted
    from leansurgeon.surgery.shrink import Decided


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
        str,
        typer.Option(
            help="Layers by auto, even, first-of-each, last-of-each, influence, angular, leave-one-out, greedy or fuse."
        ),
    ] = "auto",
    keep: Annotated[
        str | None, typer.Option(help="The layers that stay: 0,2,4-9 (from 0).", show_default=False)
    ] = None,
    more_heads: Annotated[str, typer.Option(help="add: silent new heads. split: children of the old ones.")] = "add",
    heal: Annotated[
        str, typer.Option(help="On sample data: closed refits, local also fits the blocks around a cut; none.")
    ] = "local",
    no_heal: Annotated[bool, typer.Option("--no-heal", help="The same as --heal none.", hidden=True)] = False,
    heal_time: Annotated[
        str | None, typer.Option(help="Longest time of the local fit, such as 90s or 5m.", show_default=False)
    ] = None,
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
    tower: WhichTower = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Rewrite SOURCE to more heads and fewer layers, keep what can be kept, and prove that the result loads."""
    from leansurgeon.checkpoints import digests

    if not dry_run:
        digests.begin(source)
    from leansurgeon.checkpoints.source import open_source
    from leansurgeon.surgery.plan.method import Method
    from leansurgeon.surgery.plan.planning import plan
    from leansurgeon.surgery.plan.wanted import Wanted
    from leansurgeon.surgery.shrink import decide

    wanted = Wanted(heads, layers, head_dim, mlp_dim, mlp_ratio, init, class_attention)
    wanted.check()
    healing, longest = "none" if no_heal else heal, seconds(heal_time, "--heal-time")
    how = Method(method, keep, more_heads, healing, fit, balance, uncalibrated, longest)
    task = None if calibrate or uncalibrated or init == "fresh" else trained_on(source)
    has_data = bool(calibrate or task)
    how.check(has_data)
    if compare and not (has_data and proof):
        raise UsageError("--compare scores on held-out data.", "Add --calibrate DATA and leave --no-proof out.")
    if (judge and not (proof and has_data)) or (judge and dry_run):
        raise UsageError("--judge judges a result that sample data has made.", "Add --calibrate DATA.")
    opened = open_source(source, allow_pickle=allow_pickle, tower=tower and tower.value, weights=init != "fresh")
    used, data = has_data and opened.learned and init != "fresh", None
    if params:
        data = sample_data(opened, calibrate, task, calibration_samples, seed, say) if used else None
        wanted = by_parameters(opened, params, wanted, data, seed)
    steps = plan(opened, wanted, seed, how, calibrated=used)
    folder = out or workspace / default_name(opened.slug, steps)
    if steps.before == steps.after and init == "transfer" and not (balance or class_attention or head_dim != "auto"):
        question(opened.name, as_json)
    check_before(steps, folder, compare=compare, has_data=has_data, writes=not dry_run, force=force)
    if used and data is None:
        data = sample_data(opened, calibrate, task, calibration_samples, seed, say)
    other = sample_data(opened, judge, None, None, seed, say) if judge and used else None
    decided = decide(steps, data, say)
    record = None
    if dry_run:
        decided.close()
    else:
        record = written(decided, folder, wanted if compare else None, force=force, proof=proof)
    if other and record:
        record = judged_on(judge, other, opened, folder, record)
    if as_json:
        print(json.dumps(document(decided, record, folder)))
    else:
        print(told(decided, record, folder))


def by_parameters(opened: Source, params: str, wanted: Wanted, data: Calibration | None, seed: int) -> Wanted:
    """The shape that `--params` leaves to be chosen; why is said."""
    from leansurgeon.search.choose import by_parameters as choose

    chosen = choose(opened, params, wanted, data, seed, say)
    for sentence in chosen.says:
        say(sentence)
    return chosen.wanted


def check_before(steps: Plan, folder: Path, *, compare: bool, has_data: bool, writes: bool, force: bool) -> None:
    """Refuse what cannot be written or compared before long work."""
    from leansurgeon.checkpoints.publish.output import check_apart

    if compare:
        from leansurgeon.surgery.check.compare import refuse_unlearned

        refuse_unlearned(steps.source, steps.init)
    if has_data and steps.init == "fresh":
        say(f"The sample data is not used: nothing of {steps.source.name} is kept.")
    if writes:
        hold(folder, force=force)
        check_apart(folder, steps.source.folder)


def written(decided: Decided, folder: Path, compared: Wanted | None, *, force: bool, proof: bool) -> SurgeryRecord:
    """Write the result; `compared` is what other starting points of the same shape are made for."""
    from leansurgeon.surgery.check import compare as comparison
    from leansurgeon.surgery.shrink import carry_out

    starts = None
    if compared:

        def starts(found: Proof) -> dict[str, Comparison]:
            """The comparisons of other ways to start, measured as the result was."""
            return comparison.starts(compared, decided.plan, decided.calibration, found.compared, say)

    return carry_out(decided, folder, force=force, check=proof, keep_unproved=True, starts=starts, say=say)


def document(decided: Decided, record: SurgeryRecord | None, folder: Path) -> JsonObject:
    """What --json prints; `record` is None after a dry run."""
    from leansurgeon.surgery.plan.next_steps import indivisible

    head = {"schema_version": 1, "dry_run": record is None, "out": None if record is None else str(folder)}
    found = head | {"plan": decided.plan.as_dict(), "decided": decided.record}
    found["indivisible"] = [number.as_dict() for number in indivisible(decided.plan.after)]
    found["cannot_hold"] = refused.as_dict() if (refused := decided.plan.cannot_hold) else None
    if record is None:
        return found
    found["proof"] = record.proof and record.proof.as_dict()
    if record.judged:
        found["judged"] = {name: other.as_dict() for name, other in record.judged.items()}
    if record.starts:
        found["compare"] = {name: start.as_dict() for name, start in record.starts.items()}
    return found


def told(decided: Decided, record: SurgeryRecord | None, folder: Path) -> str:
    """The same for a person."""
    from leansurgeon.report.tables.decided import closing
    from leansurgeon.report.tables.decided import table as decided_table
    from leansurgeon.report.tables.plan import plan_table
    from leansurgeon.surgery.check import compare as comparison

    lines = [plan_table(decided.plan)]
    if choices := decided_table(record.decided if record else decided.record):
        lines += ["", choices]
    if record is None:
        return "\n".join([*lines, "", "Dry run: nothing was written."])
    if record.proof is None:
        return "\n".join([*lines, "", *wrap(f"Written to {folder}; neither reloaded nor checked for NaN.")])
    lines += [closing(folder, record.proof), *compared(decided, record)]
    if record.starts:
        lines += ["", comparison.table(record.starts, decided.calibration)]
    return "\n".join(lines)


def compared(decided: Decided, record: SurgeryRecord) -> list[str]:
    """How the result's outputs compare with the source's, and on what data."""
    from leansurgeon.checkpoints.proof.report_numbers import sentence

    lines, found, data = [], record.proof.compared, decided.calibration
    if decided.plan.source.learned and decided.plan.init != "fresh":
        lines += wrap(sentence(found, record.language))
        if data is not None and found and found.done:
            other = "" if record.judged else "; --judge DATA judges on others"
            lines += wrap(f"These outputs are of the same data that was calibrated on ({data.name}){other}.")
    for name, other in record.judged.items():
        lines += wrap(f"{name}, which had no part in the making: {sentence(other, record.language)}")
    return lines


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


def judged_on(name: str, other: Calibration, opened: Source, folder: Path, made: SurgeryRecord) -> SurgeryRecord:
    """The record with the result's outputs on data that had no part in the making, written into its folder."""
    from dataclasses import replace

    from leansurgeon.checkpoints import record
    from leansurgeon.checkpoints.proof.prove import prove
    from leansurgeon.surgery.shrink import predicts_words

    causal = predicts_words(other) and other.task.head == "causal-lm"
    batches, kind = [*other.guard, *other.heldout], "causal-lm" if causal else "plain"
    say(f"Judging on {name} ...")
    account = prove(folder, made.proof.parameters, source=opened.folder, batches=batches, kind=kind)
    return record.write(folder, replace(made, judged={**made.judged, name: account.compared}))


def seconds(text: str | None, flag: str) -> float | None:
    """`90s`, `5m` or `1h` as seconds. Raises `UsageError`."""
    from leansurgeon.training.recipe.durations import parse_duration

    if text is None:
        return None
    try:
        found = parse_duration(text).seconds
    except ValueError:
        found = None
    if found is None:
        raise UsageError(f"{flag} {text}: a time with its unit is needed, such as 90s or 5m.")
    return found


def default_name(slug: str, steps: Plan) -> str:
    """Name of the output folder: the source's, heads and layers."""
    shape = steps.after
    return f"{slug}-h{shape.column('heads')}-l{shape.column('depth')}"
