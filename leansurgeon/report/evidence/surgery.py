"""`surgery.json` as a report needs it: what was cut, by what choice, and what the proof found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from leansurgeon.checkpoints.proof.report_numbers import of_comparison, of_source, sentence
from leansurgeon.checkpoints.record import DamagedRecord, Step, SurgeryRecord
from leansurgeon.checkpoints.recorded.decided import Decisions
from leansurgeon.reading.jsonfile import Json, value_at
from leansurgeon.reading.values import figures, text, whole, words
from leansurgeon.shape import Shape


@dataclass(frozen=True)
class Cut:
    """The record of a surgery in the words of a report. `proven` says how it was reloaded and `compared` what the
    comparison with its source found; `starts` are the cells of `shrink --compare`, a row for each starting point.
    """

    source: str
    preset: str  # that the model comes from in the first place
    files: tuple[tuple[str, str], ...]  # of the source, with their SHA-256
    initialised: str
    before: Shape | None
    after: Shape | None
    parameters_before: dict[str, float]
    parameters_after: dict[str, float]
    saved_by: dict[str, float]
    operators: tuple[Step, ...]
    why: str
    layers: tuple[int, ...]
    head_policy: str
    init: str
    method: dict[str, str | int | bool]
    class_attention: bool
    seed: int | None
    choice: Decisions  # what sample data or weights have decided
    proven: str
    compared: str
    starts: tuple[dict[str, str], ...]

    @property
    def changes_shape(self) -> bool:
        """Whether layers, heads or MLP differ between source and result."""
        return self.before != self.after


def cut_of(data: Json) -> Cut | None:
    """The record of a surgery as it stands in surgery.json or in a run's summary; None where there is none, or one that
    is damaged.
    """
    try:
        record = SurgeryRecord.from_dict(data)
    except DamagedRecord:
        return None
    plan, first = record.plan, record.history[0] if record.history else record.as_dict()
    if not plan:
        return None
    method = plan.get("method")
    return Cut(
        source=text(record.source.name, "?"),
        preset=text(value_at(first, "source", "preset")),
        files=tuple(words(record.source.sha256).items()),
        initialised=text(record.initialised),
        before=record.before,
        after=record.after,
        parameters_before=figures(plan.get("parameters_before")),
        parameters_after=figures(plan.get("parameters_after")),
        saved_by=figures(plan.get("saved_by")),
        operators=tuple(Step(text(s.name), text(s.exactness), text(s.says)) for s in record.steps),
        why=text(plan.get("why")),
        layers=record.layers,
        head_policy=text(plan.get("head_policy")) or str(whole(plan.get("head_policy")) or ""),
        init=text(plan.get("init")),
        method={
            key: value if isinstance(value, bool) else text(value) or whole(value) or 0
            for key, value in (method.items() if isinstance(method, Mapping) else ())
        },
        class_attention=plan.get("class_attention") is True,
        seed=whole(plan.get("seed")),
        choice=record.decided,
        proven=proven(record),
        compared=text(sentence(record.proof.compared, record.language))
        if record.proof and record.proof.compared
        else "",
        starts=starts_of(record),
    )


def judged_of(data: Json) -> tuple[tuple[str, str], ...]:
    """The data that a model was judged on, by name, and what was found, in a sentence; empty where nothing was."""
    try:
        record = SurgeryRecord.from_dict(data)
    except DamagedRecord:
        return ()
    return tuple((text(name), text(sentence(other, record.language))) for name, other in record.judged.items())


def proven(record: SurgeryRecord) -> str:
    """The sentence about the reload in a fresh process; empty without a proof."""
    if record.proof is None:
        return ""
    return (
        f"Proof: reloaded in a fresh process with {text(record.proof.loaded_with, '?')}; "
        f"{record.proof.parameters:,} parameters, {record.proof.tensors}."
    )


def starts_of(record: SurgeryRecord) -> tuple[dict[str, str], ...]:
    """Source, fresh, naive and ours on the same held-out samples, before any training."""
    if not record.starts:
        return ()
    named = [({"best": "ours"}.get(key, text(key)), start) for key, start in record.starts.items()]
    rows = [of_comparison(name, start, record.language) for name, start in named]
    last = named[-1][1]
    if last.loss:
        rows.insert(0, of_source("the source itself", last, record.language))
    return tuple({key: text(value) for key, value in row.items()} for row in rows)
