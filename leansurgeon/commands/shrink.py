"""Shrink a model: what is wanted, sample data, the plan, what data decides, and the folder with its proof."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationInfo

from leansurgeon.checkpoints import digests
from leansurgeon.checkpoints.places import without_places
from leansurgeon.checkpoints.proof.report_numbers import sentence
from leansurgeon.checkpoints.publish.output import check_apart, held
from leansurgeon.checkpoints.record import Comparison, Proof, SurgeryRecord
from leansurgeon.checkpoints.recorded.part import plain
from leansurgeon.checkpoints.source import Source, ask_tower, left_out, open_source
from leansurgeon.commands import in_memory
from leansurgeon.commands.command import Command
from leansurgeon.commands.options import Data, DataRequest, DeviceRequest, PushRequest, Seconds, spell_share
from leansurgeon.commands.results import Cut
from leansurgeon.commands.samples import (
    BY_WEIGHTS,
    own_samples,
    sample_data,
    sample_data_of_all,
    trained_on,
    tried,
)
from leansurgeon.errors import UsageError
from leansurgeon.measure.data.calibration import Batch, Calibration
from leansurgeon.progress import Say
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.report.tables.decided import closing
from leansurgeon.report.tables.decided import table as decided_table
from leansurgeon.report.tables.in_words import verdict
from leansurgeon.report.tables.plan import plan_table
from leansurgeon.request import Access, Names, Number, Opt, ShapeRequest
from leansurgeon.surgery.check import compare, judged
from leansurgeon.surgery.plan.method import Method
from leansurgeon.surgery.plan.next_steps import indivisible
from leansurgeon.surgery.plan.planning import Plan, plan, without_data
from leansurgeon.surgery.plan.wanted import Wanted
from leansurgeon.surgery.shrink import Decided, carry_out, decide, telling_what_is_kept, unread
from leansurgeon.words import wrap


def name_sources(value: Names | in_memory.Data | None, field: ValidationInfo) -> tuple[str, ...]:
    """Sample data as names: on the command line each is a source; in Python all that is given is one."""
    if isinstance(value, Names):
        return value
    named = in_memory.data(value, field.field_name or "data")
    return () if named is None else (named,)


class ShrinkRequest(ShapeRequest, DataRequest, DeviceRequest, PushRequest, Access):
    """What is wanted of a source, how it is carried out, and where the result goes."""

    source: Annotated[
        str, Opt("Preset, folder, run, hub id or timm/NAME.", complete="sources", positional=True, model=True)
    ]
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
    samples: Annotated[int | None, Field(ge=2), Opt("Samples to fit on, plus a quarter for validation.", "Data")] = None
    uncalibrated: Annotated[bool, Opt("Use the weights alone, even if quality drops.", "Method")] = False
    judge: Annotated[Data | None, Opt("Also judge the result on other data.", "Data", cli=str)] = None
    init: Annotated[
        str, Opt("transfer keeps what can be kept; fresh is the paper's way; or fresh-attention.", "Method")
    ] = "transfer"
    method: Annotated[
        str,
        Opt("Layers by auto, even, first-of-each, last-of-each, influence, angular, leave-one-out, greedy.", "Method"),
    ] = "auto"
    keep: Annotated[Number | None, Opt("The layers that stay: 0,2,4-9 (from 0).", "Method", cli=str)] = None
    more_heads: Annotated[str, Opt("add: silent new heads. split: children of the old ones.", "Method")] = "add"
    heal: Annotated[str, Opt("With data: closed refits, local also fits the blocks around a cut; none.", "Method")] = (
        "local"
    )
    heal_time: Annotated[Seconds | None, Opt("Longest time of the local fit: 90s or 5m.", "Method", cli=str)] = None
    balance: Annotated[bool, Opt("Even out values and outputs by an exact change of basis.", "Method")] = False
    compare: Annotated[bool, Opt("Also score a fresh and a naive start of the same shape.", "Output")] = False
    proof: Annotated[bool, Opt("Reload the result and compare it.", "Output", ("--proof/--no-proof",))] = True
    seed: Annotated[int, Opt("Seed of everything that is drawn.")] = 0
    out: Annotated[Path | None, Opt("Folder to write. Default: WORKSPACE/NAME-h24-l10.", "Output", ("--out", "-o"))] = (
        None
    )
    workspace: Annotated[Path, Opt("Where models and runs live.", "Output")] = Path("runs")
    resume: Annotated[bool, Opt("Continue an interrupted cut to the same folder.")] = False
    dry_run: Annotated[bool, Opt("Print the plan and write nothing.", "Output")] = False
    force: Annotated[bool, Opt("Replace an existing output folder.", "Output")] = False

    @property
    def wanted(self) -> Wanted:
        """The shape."""
        return Wanted(**self.model_dump(include={*ShapeRequest.model_fields, "init"}))

    @property
    def how(self) -> Method:
        """The way."""
        return Method(
            self.method, self.keep, self.more_heads, self.heal, self.balance, self.uncalibrated, self.heal_time
        )


def shrink(request: ShrinkRequest, say: Say) -> Cut:
    """Rewrite SOURCE to more heads and fewer layers, keep what can be kept, and prove that the result loads.

    In Python a path gives a `Cut`: its folder, the record and the proof; `.model` loads it. A model in memory gives a
    model, on the same device and in the same precision, whose `Cut` is `model.leansurgeon`; without `out` its folder
    is a temporary one. `tokenizer` is needed for texts where the model does not say where it came from.

    >>> import leansurgeon, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> cut = leansurgeon.shrink("digits-vit", heads="2x", layers=3, out=f"{folder}/lean", progress=False)
    >>> cut.before.depth, cut.after.depth, cut.after.column("heads")
    (6, 3, '8')
    >>> cut.proof.parameters == sum(p.numel() for p in cut.model.parameters())
    True

    Raises `UsageError` for what cannot be, before long work, `UnsupportedModel` for a source that cannot be read,
    `OutOfMemory`, and `Diverged` for weights that are no numbers.
    """
    with digests.early(None if request.dry_run else request.source):
        decided, record, folder = cut(request, say)
    return Cut(folder, record, document_of(decided, record, folder), describe(decided, record, folder))


def cut(request: ShrinkRequest, say: Say) -> tuple[Decided, SurgeryRecord | None, Path]:
    """What was decided, the record of the result (None: a dry run wrote nothing), and its folder."""
    wanted, how, source, seed = request.wanted, request.how, request.source, request.seed
    wanted.check()
    task = None if request.data or how.uncalibrated or wanted.init == "fresh" else trained_on(source)
    has_data = bool(request.data or task)
    check(request, how, has_data)
    opened = open_source(source, allow_pickle=request.allow_pickle, weights=wanted.init != "fresh")
    ask_tower(opened, request.tower)
    knows = opened.learned and wanted.init != "fresh"
    used, own, data = has_data and knows, knows and not (has_data or how.uncalibrated), None
    place = device_of(request.device, computes=used or own)

    def samples() -> Calibration:
        """The data to choose and refit on, opened once."""
        return sample_data_of_all(opened, request.data, task, request.samples, seed, say, place, request.columns)

    if request.params:
        from leansurgeon.search.choose import by_parameters

        data = samples() if used else None
        chosen = by_parameters(opened, request.params, wanted, data, seed, say)
        for sentence in chosen.says:
            say(sentence)
        wanted = chosen.wanted
    steps = plan(opened, wanted, seed, how, calibrated=used or own)
    if own and not steps.asks_data:
        steps, own = without_data(steps), False
    if opened.weights is not None and not request.dry_run and (names := unread(steps)):
        specs = tuple(spec for spec in opened.specs if spec.name not in names)
        opened = replace(opened, specs=specs, notes=(*opened.notes, left_out(names, opened.config)))
        steps = plan(opened, wanted, seed, how, calibrated=used or own)
    for note in opened.notes:
        say(f"{note[:1].upper()}{note[1:]}.")
    heads, layers = steps.after.column("heads"), steps.after.column("depth")
    folder = request.out or request.workspace / f"{opened.slug}-h{heads}-l{layers}"
    if opened.weights is not None and nothing_changes(steps, wanted, how):  # of a preset a new model is made
        raise UsageError(
            f"Nothing is to be changed, so the result would be a copy of {opened.name}.",
            "Say what to change: --heads 2x, --layers 6, --mlp-dim 512 or --params -30%.",
        )
    with held_for(steps, folder, request, has_data=has_data, say=say):
        if used and data is None:
            data = samples()
        other = None
        if request.judge and used:
            other = sample_data(opened, request.judge, None, None, seed, say, "--judge", place, request.columns)
        settings = {"device": place, "output": None if request.dry_run else folder, "resume": request.resume}
        decided = decide_on_own(steps, opened, say, settings) if own else decide(steps, data, say, **settings)
        if request.dry_run:
            decided.close()
            return decided, None, folder
        made = carried_out(decided, folder, wanted if request.compare else None, request, say)
        for name, part in (domains(decided.calibration) if request.proof else {}).items():
            made = judged_on(name, part.heldout, part, folder, made, opened, say)
        if other and request.judge:
            made = judged_on(request.judge, other.heldout, other, folder, made, opened, say)
    return decided, made, folder


def document_of(decided: Decided, record: SurgeryRecord | None, folder: Path) -> JsonObject:
    """What --json prints."""
    head = {"schema_version": 1, "dry_run": record is None, "out": record and str(folder)}
    document = head | {"plan": decided.plan.as_dict(), "decided": decided.record.as_dict()}
    document["indivisible"] = plain(list(map(vars, indivisible(decided.plan.after))))
    document["cannot_hold"] = plain(vars(refused)) if (refused := decided.plan.cannot_hold) else None
    if record is None:
        return document
    document["proof"] = record.proof and record.proof.as_dict()
    if record.judged:
        document["judged"] = {name: other.as_dict() for name, other in record.judged.items()}
    if record.starts:
        document["compare"] = {name: start.as_dict() for name, start in record.starts.items()}
    return document


def describe(decided: Decided, record: SurgeryRecord | None, folder: Path) -> str:
    """The plan, what data decided, and how the result compares, for a person."""
    lines = [*first_words(decided, record), plan_table(decided.plan)]
    if choices := decided_table(record.decided if record else decided.record):
        lines += ["", choices]
    if record is None:
        return "\n".join([*lines, "", "Dry run: nothing was written."])
    if record.proof is None:
        return "\n".join([*lines, "", *wrap(f"Written to {folder}; neither reloaded nor checked for NaN.")])
    lines += [closing(folder, record.proof), *compared(decided, record)]
    if record.starts:
        lines += ["", compare.table(record.starts, decided.calibration)]
    return "\n".join(lines)


def device_of(asked: str, *, computes: bool) -> str:
    """The device of `--device`; torch is not asked where nothing is computed. Raises `UsageError`."""
    if not computes and asked == "auto":
        return "cpu"
    from leansurgeon.measure.device import chosen

    return chosen(asked)


def decide_on_own(steps: Plan, opened: Source, say: Say, settings: Mapping[str, Any]) -> Decided:
    """The plan decided on samples that the model makes itself, where it can; else by its weights alone. A dry run,
    which has no output, does not make any. `settings` are those of `decide`.
    """
    if settings["output"] is None:
        say("A dry run makes no samples: which layers stay is open until then.")
        return Decided(steps)
    if data := own_samples(opened, steps.seed, settings["device"], say):
        decided, why = tried(lambda: decide(steps, data, say, **settings))
        if decided is not None:
            return decided
        say(f"{why} {BY_WEIGHTS}")
    return decide(without_data(steps), None, say)


def check(request: ShrinkRequest, how: Method, has_data: bool) -> None:
    """Refuse what excludes each other before anything is opened. Raises `UsageError`."""
    how.check(has_data)
    if request.compare and not (has_data and request.proof):
        raise UsageError("--compare scores on held-out data.", "Add --calibrate DATA and leave --no-proof out.")
    if (request.judge and not (request.proof and has_data)) or (request.judge and request.dry_run):
        raise UsageError("--judge judges a result that sample data has made.", "Add --calibrate DATA.")


def nothing_changes(steps: Plan, wanted: Wanted, how: Method) -> bool:
    """Whether the result would be a copy, where nothing that leaves the shape was asked for either."""
    asked = how.balance or wanted.class_attention or wanted.head_dim != "auto" or wanted.init != "transfer"
    return steps.before == steps.after and not asked


@contextmanager
def held_for(steps: Plan, folder: Path, request: ShrinkRequest, *, has_data: bool, say: Say) -> Iterator[None]:
    """Refuse what cannot be written or compared before long work, and hold the output's name while the block runs."""
    if request.compare:
        compare.refuse_unlearned(steps.source, steps.init)
    if has_data and steps.init == "fresh":
        say(f"The sample data is not used: nothing of {steps.source.name} is kept.")
    if request.dry_run:
        yield
        return
    with held(folder, force=request.force), telling_what_is_kept(folder):
        check_apart(folder, steps.source.folder)
        yield


def carried_out(
    decided: Decided, folder: Path, compared: Wanted | None, request: ShrinkRequest, say: Say
) -> SurgeryRecord:
    """Write the result; `compared` is what other starting points of the same shape are made for."""

    def starts(proof: Proof) -> dict[str, Comparison]:
        """The comparisons of other ways to start, measured as the result was."""
        return compare.starts(compared, decided.plan, decided.calibration, proof.compared, say)

    how = {"force": request.force, "check": request.proof, "starts": starts if compared else None}
    return carry_out(decided, folder, keep_unproved=True, say=say, **how)


def domains(data: Calibration | None) -> dict[str, Calibration]:
    """The sources of mixed sample data by the names that records have for them."""
    by_name: dict[str, Calibration] = {}
    for source in data.sources if data else ():
        name = without_places(source.name)
        while name in by_name:  # files of one name in two folders
            name += "'"
        by_name[name] = source
    return by_name


def judged_on(
    name: str,
    batches: Sequence[Batch],
    other: Calibration,
    folder: Path,
    made: SurgeryRecord,
    opened: Source,
    say: Say,
) -> SurgeryRecord:
    """The record with the result's outputs on batches of `other` that had no part in the making, written into its
    folder.
    """
    say(f"Judging on {name} ...")
    found = judged.on_data(other, opened, folder, made.proof.parameters, batches, fitted=made.all_fitted)
    return judged.note(folder, made, {name: found})


def first_words(decided: Decided, record: SurgeryRecord | None) -> list[str]:
    """The verdict, before all numbers; nothing where the result was not compared with what it was cut from."""
    plan = decided.plan
    if record is None or record.proof is None or not plan.source.learned or plan.init == "fresh":
        return []
    saved = 1 - plan.parameters_after.total / max(1, plan.parameters_before.total)
    told = verdict(plan.before, plan.after, record.proof.compared, record.language, saved)
    return [*wrap(told), ""] if told else []


def compared(decided: Decided, record: SurgeryRecord) -> list[str]:
    """How the result's outputs compare with the source's, and on what data."""
    from leansurgeon.measure.data.own import NAME as OWN

    lines, comparison, data = [], record.proof.compared, decided.calibration
    if decided.plan.source.learned and decided.plan.init != "fresh":
        lines += wrap(sentence(comparison, record.language))
        if data is not None and comparison and comparison.done:
            other = "" if record.judged else "; --judge DATA judges on others"
            of = f"what {decided.plan.source.name} made itself" if data.name == OWN else data.name
            lines += wrap(f"These outputs are of the same data that was calibrated on ({of}){other}.")
    sources = domains(data)
    for name, other in record.judged.items():
        part = "held-out samples" if name in sources else "which had no part in the making"
        lines += wrap(f"{name}, {part}: {sentence(other, record.language)}")
    return lines


EXAMPLES = (
    "leansurgeon shrink digits-vit --heads 8 --layers 3",
    "leansurgeon shrink my-model --layers 24 --calibrate texts/ -o runs/lean",
)
COMMAND = Command("shrink", ShrinkRequest, shrink, EXAMPLES, gives_model=True, temporary_out=True)
