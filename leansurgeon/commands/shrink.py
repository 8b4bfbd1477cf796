"""Shrink a model: parse the request, load sample data, plan, decide on the data, and write the folder with its
verification.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationInfo

from leansurgeon.checkpoints import digests
from leansurgeon.checkpoints.places import without_places
from leansurgeon.checkpoints.proof.report_numbers import sentence
from leansurgeon.checkpoints.publish.output import check_apart, hold_output
from leansurgeon.checkpoints.record import SurgeryRecord
from leansurgeon.checkpoints.recorded.part import plain
from leansurgeon.checkpoints.source import Source, ask_tower, describe_unread, open_source
from leansurgeon.commands import in_memory
from leansurgeon.commands.command import Command
from leansurgeon.commands.compare import tabulate
from leansurgeon.commands.in_memory import Cut
from leansurgeon.commands.options import DataRequest, DeviceRequest, DryRun, Force, PushRequest, Seconds, spell_share
from leansurgeon.commands.samples import (
    BY_WEIGHTS,
    own_samples,
    sample_data_of_all,
    task_of_run,
    try_work,
)
from leansurgeon.errors import LeanSurgeonError, UsageError
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.progress import Say
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.report.tables.cut import closing, decided_table, plan_table, state_verdict
from leansurgeon.request import Access, Names, Number, Opt, ShapeRequest, SourceName, command_line
from leansurgeon.surgery import judged
from leansurgeon.surgery.method import LAYERS, Method
from leansurgeon.surgery.next_steps import indivisible
from leansurgeon.surgery.planning import Plan, plan, without_data
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.shrink import DecidedCut, carry_out, decide, telling_what_is_kept, unread
from leansurgeon.words import wrap


def name_sources(value: Names | in_memory.Data | None, field: ValidationInfo) -> tuple[str, ...]:
    """Return sample data as names: on the command line each is a source; in Python everything given is one."""
    if isinstance(value, Names):
        return value
    named = in_memory.data(value, field.field_name or "data")
    return () if named is None else (named,)


class ShrinkRequest(ShapeRequest, DataRequest, DeviceRequest, PushRequest, Access):
    """What is wanted of a source, how to do it, and where the result goes."""

    source: SourceName
    params: Annotated[
        str | None,
        BeforeValidator(spell_share),
        Opt("Target size: -30%, 70% or 60M; explains the shape it picks.", "Shape", cli=str),
    ] = None
    data: Annotated[
        tuple[str, ...],
        BeforeValidator(name_sources),
        Opt(
            "Data that chooses the layers and refits: text files, a table, a folder of images, or task:NAME,key=value. "
            "Several times: an even mixture. Default: what a run was trained on, else what the model makes itself.",
            "Data",
            ("--calibrate", "--data"),
            cli=list[str],
        ),
    ] = ()
    samples: Annotated[
        int | None, Field(ge=2), Opt("Samples to fit on, plus a quarter for validation.", "Data", shown=False)
    ] = None
    uncalibrated: Annotated[bool, Opt("Use the weights alone, even if quality drops.", "Method")] = False
    init: Annotated[
        str, Opt("transfer keeps what can be kept; fresh is the paper's way; or fresh-attention.", "Method")
    ] = "transfer"
    method: Annotated[str, Opt(f"Layers by {', '.join(LAYERS)}.", "Method")] = "auto"
    keep: Annotated[Number | None, Opt("The layers that stay: 0,2,4-9 (from 0).", "Method", cli=str)] = None
    more_heads: Annotated[str, Opt("add: silent new heads. split: children of the old ones.", "Method")] = "add"
    heal: Annotated[str, Opt("With data: closed refits, local also fits the blocks around a cut; none.", "Method")] = (
        "local"
    )
    heal_time: Annotated[Seconds | None, Opt("Longest time of the local fit: 90s or 5m.", "Method", cli=str)] = None
    balance: Annotated[bool, Opt("Even out values and outputs by an exact change of basis.", "Method")] = False
    proof: Annotated[bool, Opt("Reload the result and compare it.", "Output", ("--proof/--no-proof",), shown=False)] = (
        True
    )
    seed: Annotated[int, Opt("Random seed.", shown=False)] = 0
    out: Annotated[Path | None, Opt("Folder to write. Default: runs/NAME-h24-l10.", "Output", ("--out", "-o"))] = None
    resume: Annotated[bool, Opt("Continue an interrupted cut to the same folder.")] = False
    dry_run: DryRun = False
    force: Force = False


def shrink(request: ShrinkRequest, say: Say) -> Cut:
    """Rewrite SOURCE to more heads and fewer layers, keep what can be kept, and prove that the result loads.

    In Python a path gives a `Cut`: its folder, the record and the proof; `.model` loads it. A model in memory gives a
    model, on the same device and in the same precision, whose `Cut` is `model.leansurgeon`; without `out` its folder is
    a temporary one. `tokenizer` is needed for texts if the model does not say where it was loaded from.

    >>> import leansurgeon, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> cut = leansurgeon.shrink("digits-vit", heads="2x", layers=3, out=f"{folder}/lean", progress=False)
    >>> cut.before.depth, cut.after.depth, cut.after.column("heads")
    (6, 3, '8')
    >>> cut.proof.parameters == sum(p.numel() for p in cut.model.parameters())
    True

    Raises `UsageError` for impossible requests, before long work, `UnsupportedModel` for a source that cannot be read,
    `OutOfMemory`, and `Diverged` for weights that are no numbers.
    """
    with digests.early(None if request.dry_run else request.source):
        decided, record, folder = cut_model(request, say)
        return Cut(folder, record, document_of(decided, record, folder), describe(decided, record, folder))


def cut_model(request: ShrinkRequest, say: Say) -> tuple[DecidedCut, SurgeryRecord | None, Path]:
    """Return what was decided, the record of the result (None after a dry run), and its folder."""
    source, seed = request.source, request.seed
    wanted = RequestedShape(**request.model_dump(include={*ShapeRequest.model_fields, "init"}))
    same = request.model_dump(include={"keep", "heal", "balance", "uncalibrated", "heal_time"})
    how = Method(request.method, more=request.more_heads, **same)
    wanted.check()
    task = None if request.data or how.uncalibrated or wanted.init == "fresh" else task_of_run(source)
    has_data = bool(request.data or task)
    how.check(has_data)
    opened = open_source(source, allow_pickle=request.allow_pickle, weights=wanted.init != "fresh")
    ask_tower(opened, request.tower)
    knows = opened.learned and wanted.init != "fresh"
    used, own, data = has_data and knows, knows and not (has_data or how.uncalibrated), None
    place = "cpu"
    if used or own or request.device != "auto":  # else nothing is computed, and torch is not imported
        from leansurgeon.measure.device import choose_device

        place = choose_device(request.device)

    def samples() -> Calibration:
        """Open the data to choose and refit on, once."""
        return sample_data_of_all(opened, request.data, task, request.samples, seed, say, place, request.columns)

    if request.params:
        from leansurgeon.search.choose import by_parameters

        data = samples() if used else None
        wanted, reasons = by_parameters(opened, request.params, wanted, data, seed, say)
        for reason in reasons:
            say(reason)
    steps = plan(opened, wanted, seed, how, calibrated=used or own)
    if own and not steps.asks_data:
        steps, own = without_data(steps), False
    if opened.weights is not None and not request.dry_run and (names := unread(steps)):
        specs = tuple(spec for spec in opened.specs if spec.name not in names)
        opened = replace(opened, specs=specs, notes=(*opened.notes, describe_unread(names, opened.config)))
        steps = plan(opened, wanted, seed, how, calibrated=used or own)
    for note in opened.notes:
        say(f"{note[:1].upper()}{note[1:]}.")
    heads, layers = steps.after.column("heads"), steps.after.column("depth")
    folder = request.out or Path("runs") / f"{opened.slug}-h{heads}-l{layers}"
    beside = how.balance or wanted.class_attention or wanted.head_dim != "auto" or wanted.init != "transfer"
    if opened.weights is not None and steps.before == steps.after and not beside:  # of a preset a new model is made
        raise UsageError(
            f"No change was asked for, so the result would be a copy of {opened.name}.",
            "Say what to change: --heads 2x, --layers 6, --mlp-dim 512 or --params -30%.",
        )
    if has_data and steps.init == "fresh":
        say(f"The sample data is not used: nothing of {opened.name} is kept.")
    with ExitStack() as stack:
        if not request.dry_run:
            stack.enter_context(hold_output(folder, force=request.force))
            stack.enter_context(telling_what_is_kept(folder))
            check_apart(folder, opened.folder)
        data = samples() if used and data is None else data
        settings = {"device": place, "output": None if request.dry_run else folder, "resume": request.resume}
        decided = decide_on_own(steps, opened, say, settings) if own else decide(steps, data, say, **settings)
        if request.dry_run:
            decided.close()
            return decided, None, folder
        written = {"force": request.force, "check": request.proof, "call": command_line("shrink", request)}
        made = carry_out(decided, folder, keep_unproved=True, say=say, **written)
        judging = decided.calibration.sources if decided.calibration and request.proof else ()
        for part in judging:  # each source of mixed data, by its name in records
            name = without_places(part.name)
            while name in made.judged:  # files of the same name in two folders
                name += "'"
            say(f"Judging on {name} ...")
            found = judged.on_data(part, opened, folder, made.proof.parameters, fitted=made.all_fitted)
            made = judged.note(folder, made, {name: found})
    return decided, made, folder


def document_of(decided: DecidedCut, record: SurgeryRecord | None, folder: Path) -> JsonObject:
    """Return what --json prints."""
    head = {"schema_version": 1, "dry_run": record is None, "out": record and str(folder)}
    document = head | {"plan": decided.plan.as_dict(), "decided": decided.record.as_dict()}
    document["indivisible"] = plain(list(map(vars, indivisible(decided.plan.after))))
    document["cannot_hold"] = plain(vars(refused)) if (refused := decided.plan.cannot_hold) else None
    if record is None:
        return document
    document["proof"] = record.proof and record.proof.as_dict()
    if record.judged:
        document["judged"] = {name: other.as_dict() for name, other in record.judged.items()}
    return document


def describe(decided: DecidedCut, record: SurgeryRecord | None, folder: Path) -> str:
    """Describe the result for a person: the verdict first, then the plan, what the data decided, and the comparison."""
    steps, lines = decided.plan, [plan_table(decided.plan)]
    if choices := decided_table(record.decided if record else decided.record):
        lines += ["", choices]
    if record is None:
        return "\n".join([*lines, "", "Dry run: nothing was written."])
    if record.proof is None:
        return "\n".join([*lines, "", *wrap(f"Written to {folder}; neither reloaded nor checked for NaN.")])
    lines.append(closing(folder, record.proof))
    compared, data = record.proof.compared, decided.calibration
    if steps.source.learned and steps.init != "fresh":
        saved = 1 - steps.parameters_after.total / max(1, steps.parameters_before.total)
        if told := state_verdict(steps.before, steps.after, compared, record.language, saved):
            lines = [*wrap(told), "", *lines]
        lines += wrap(sentence(compared, record.language))
        if data is not None and compared and compared.done:
            from leansurgeon.measure.data.own import NAME as OWN

            other = "" if record.judged else "; `leansurgeon judge` judges on others"
            of = f"what {steps.source.name} made itself" if data.name == OWN else data.name
            lines += wrap(f"These outputs are of the same data that was calibrated on ({of}){other}.")
    for name, other in record.judged.items():
        lines += wrap(f"{name}, held-out samples: {sentence(other, record.language)}")
    with suppress(LeanSurgeonError):  # the cut is written, even if the table fails
        lines.append(tabulate(folder))
    return "\n".join(lines).rstrip("\n")


def decide_on_own(steps: Plan, opened: Source, say: Say, settings: Mapping[str, Any]) -> DecidedCut:
    """Carry out the plan's decisions on samples that the model generates itself, or else by its weights alone.
    `settings` are those of `decide`.

    A dry run, which has no output, generates no samples.
    """
    if settings["output"] is None:
        say("A dry run makes no samples, so the layers to keep are not chosen yet.")
        return DecidedCut(steps)
    if data := own_samples(opened, steps.seed, settings["device"], say):
        decided, why = try_work(lambda: decide(steps, data, say, **settings))
        if decided is not None:
            return decided
        say(f"{why} {BY_WEIGHTS}")
    return decide(without_data(steps), None, say)


EXAMPLES = (
    "leansurgeon shrink digits-vit --heads 8 --layers 3",
    "leansurgeon shrink my-model --layers 24 --calibrate texts/ -o runs/lean",
)
COMMAND = Command("shrink", ShrinkRequest, shrink, EXAMPLES, gives_model=True, temporary_out=True)
