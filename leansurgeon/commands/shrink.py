"""Shrink a model: what is wanted, sample data, the plan, what data decides, and the folder with its proof."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from leansurgeon.checkpoints import digests
from leansurgeon.checkpoints.places import without_places
from leansurgeon.checkpoints.proof.report_numbers import sentence
from leansurgeon.checkpoints.publish.output import check_apart, held
from leansurgeon.checkpoints.record import Comparison, Proof, SurgeryRecord
from leansurgeon.checkpoints.recorded.part import plain
from leansurgeon.checkpoints.source import Source, ask_tower, left_out, open_source
from leansurgeon.errors import UsageError
from leansurgeon.measure.data.calibration import Batch, Calibration
from leansurgeon.progress import Say
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.report.tables.decided import closing
from leansurgeon.report.tables.decided import table as decided_table
from leansurgeon.report.tables.in_words import verdict
from leansurgeon.report.tables.plan import plan_table
from leansurgeon.surgery.check import compare, judged
from leansurgeon.surgery.plan.method import Method
from leansurgeon.surgery.plan.next_steps import indivisible
from leansurgeon.surgery.plan.planning import Plan, plan, without_data
from leansurgeon.surgery.plan.wanted import Wanted
from leansurgeon.surgery.shrink import Decided, carry_out, decide, telling_what_is_kept, unread
from leansurgeon.training.recipe.durations import clock_seconds
from leansurgeon.training.runs.sample_data import (
    BY_WEIGHTS,
    own_samples,
    sample_data,
    sample_data_of_all,
    trained_on,
    tried,
)
from leansurgeon.words import wrap


@dataclass(frozen=True)
class ShrinkOptions:
    """What is asked of a source, beside its shape (`Wanted`) and the way (`Method`). `data` and `judge` name sample
    data as `--calibrate` does (`data` also several sources); `params` is a number of parameters from which the shape is
    chosen; `out` None is a name in the `workspace`; `resume` goes on with an interrupted cut to it.
    """

    data: str | Sequence[str] | None = None
    samples: int | None = None
    judge: str | None = None
    params: str | None = None
    compare: bool = False
    proof: bool = True
    seed: int = 0
    out: Path | None = None
    workspace: Path = Path("runs")
    columns: str | None = None
    dry_run: bool = False
    force: bool = False
    tower: str | None = None
    allow_pickle: bool = False
    called: str | None = None  # the source's name, where its path says nothing
    device: str = "auto"
    resume: bool = False

    @property
    def sources(self) -> Sequence[str]:
        """The names of sample data, one for each source."""
        return (self.data,) if isinstance(self.data, str) else tuple(self.data or ())


@dataclass(frozen=True)
class Shrunk:
    """What came of it: the plan with what was decided, and the record of the result in `folder`; no record where
    nothing was written.
    """

    decided: Decided
    record: SurgeryRecord | None
    folder: Path

    def as_dict(self) -> JsonObject:
        """What --json prints."""
        head = {"schema_version": 1, "dry_run": self.record is None, "out": self.record and str(self.folder)}
        document = head | {"plan": self.decided.plan.as_dict(), "decided": self.decided.record.as_dict()}
        document["indivisible"] = plain(list(map(vars, indivisible(self.decided.plan.after))))
        document["cannot_hold"] = plain(vars(refused)) if (refused := self.decided.plan.cannot_hold) else None
        if self.record is None:
            return document
        document["proof"] = self.record.proof and self.record.proof.as_dict()
        if self.record.judged:
            document["judged"] = {name: other.as_dict() for name, other in self.record.judged.items()}
        if self.record.starts:
            document["compare"] = {name: start.as_dict() for name, start in self.record.starts.items()}
        return document

    def told(self) -> str:
        """The plan, what data decided, and how the result compares, for a person."""
        decided, record, folder = self.decided, self.record, self.folder
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


def shrink(
    source: str, wanted: Wanted, how: Method, asked: ShrinkOptions, say: Say, *, unchanged: Say | None = None
) -> Shrunk:
    """Rewrite a source to another shape, and prove it. `unchanged` is told the source's name where nothing is to be
    changed, and may raise.

    Raises `UsageError` for what cannot be, before long work; and what opening, calibrating and writing raise.
    """
    with digests.early(None if asked.dry_run else source):
        return _shrink(source, wanted, how, asked, say, unchanged)


def _shrink(source: str, wanted: Wanted, how: Method, asked: ShrinkOptions, say: Say, unchanged: Say | None) -> Shrunk:
    wanted.check()
    task = None if asked.sources or how.uncalibrated or wanted.init == "fresh" else trained_on(source)
    has_data = bool(asked.sources or task)
    check(asked, how, has_data)
    opened = open_source(source, allow_pickle=asked.allow_pickle, tower=asked.tower, weights=wanted.init != "fresh")
    ask_tower(opened, asked.tower)
    opened = replace(opened, name=asked.called) if asked.called else opened
    knows = opened.learned and wanted.init != "fresh"
    used, own, data = has_data and knows, knows and not (has_data or how.uncalibrated), None
    place = device_of(asked.device, computes=used or own)

    def samples() -> Calibration:
        """The data to choose and heal on, opened once."""
        return sample_data_of_all(opened, asked.sources, task, asked.samples, asked.seed, say, place, asked.columns)

    if asked.params:
        from leansurgeon.search.choose import by_parameters

        data = samples() if used else None
        chosen = by_parameters(opened, asked.params, wanted, data, asked.seed, say)
        for sentence in chosen.says:
            say(sentence)
        wanted = chosen.wanted
    steps = plan(opened, wanted, asked.seed, how, calibrated=used or own)
    if own and not steps.asks_data:
        steps, own = without_data(steps), False
    if (used or own) and (names := unread(steps)):  # torch is needed in any case
        specs = tuple(spec for spec in opened.specs if spec.name not in names)
        opened = replace(opened, specs=specs, notes=(*opened.notes, left_out(names, opened.config)))
        steps = plan(opened, wanted, asked.seed, how, calibrated=used or own)
    for note in opened.notes:
        say(f"{note[:1].upper()}{note[1:]}.")
    heads, layers = steps.after.column("heads"), steps.after.column("depth")
    folder = asked.out or asked.workspace / f"{opened.slug}-h{heads}-l{layers}"
    if unchanged and nothing_changes(steps, wanted, how):
        unchanged(opened.name)
    with held_for(steps, folder, asked, has_data=has_data, say=say):
        if used and data is None:
            data = samples()
        other = None
        if asked.judge and used:
            other = sample_data(opened, asked.judge, None, None, asked.seed, say, "--judge", place, asked.columns)
        settings = {"device": place, "output": None if asked.dry_run else folder, "resume": asked.resume}
        decided = decide_on_own(steps, opened, say, settings) if own else decide(steps, data, say, **settings)
        if asked.dry_run:
            decided.close()
            return Shrunk(decided, None, folder)
        made = carried_out(decided, folder, wanted if asked.compare else None, asked, say)
        for name, part in (domains(decided.calibration) if asked.proof else {}).items():
            made = judged_on(name, part.heldout, part, folder, made, opened, say)
        if other and asked.judge:
            made = judged_on(asked.judge, other.heldout, other, folder, made, opened, say)
    return Shrunk(decided, made, folder)


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


def check(asked: ShrinkOptions, how: Method, has_data: bool) -> None:
    """Refuse what excludes each other before anything is opened. Raises `UsageError`."""
    how.check(has_data)
    if asked.compare and not (has_data and asked.proof):
        raise UsageError("--compare scores on held-out data.", "Add --calibrate DATA and leave --no-proof out.")
    if (asked.judge and not (asked.proof and has_data)) or (asked.judge and asked.dry_run):
        raise UsageError("--judge judges a result that sample data has made.", "Add --calibrate DATA.")


def nothing_changes(steps: Plan, wanted: Wanted, how: Method) -> bool:
    """Whether the result would be a copy, where nothing that leaves the shape was asked for either."""
    asked = how.balance or wanted.class_attention or wanted.head_dim != "auto" or wanted.init != "transfer"
    return steps.before == steps.after and not asked


@contextmanager
def held_for(steps: Plan, folder: Path, asked: ShrinkOptions, *, has_data: bool, say: Say) -> Iterator[None]:
    """Refuse what cannot be written or compared before long work, and hold the output's name while the block runs."""
    if asked.compare:
        compare.refuse_unlearned(steps.source, steps.init)
    if has_data and steps.init == "fresh":
        say(f"The sample data is not used: nothing of {steps.source.name} is kept.")
    if asked.dry_run:
        yield
        return
    with held(folder, force=asked.force), telling_what_is_kept(folder):
        check_apart(folder, steps.source.folder)
        yield


def carried_out(
    decided: Decided, folder: Path, compared: Wanted | None, asked: ShrinkOptions, say: Say
) -> SurgeryRecord:
    """Write the result; `compared` is what other starting points of the same shape are made for."""

    def starts(proof: Proof) -> dict[str, Comparison]:
        """The comparisons of other ways to start, measured as the result was."""
        return compare.starts(compared, decided.plan, decided.calibration, proof.compared, say)

    how = {"force": asked.force, "check": asked.proof, "starts": starts if compared else None}
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


def seconds(text: str | None, flag: str) -> float | None:
    """`90s`, `5m` or `1h` as seconds. Raises `UsageError`."""
    duration = None if text is None else clock_seconds(text)
    if duration is None and text is not None:
        raise UsageError(f"{flag} {text}: a time with its unit is needed, such as 90s or 5m.")
    return duration
