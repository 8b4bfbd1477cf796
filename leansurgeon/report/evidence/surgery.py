"""`surgery.json` as a report needs it: what was cut, by what choice, and what the proof found."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from leansurgeon.checkpoints.proof.report_numbers import cells_of, sentence
from leansurgeon.checkpoints.record import SurgeryRecord
from leansurgeon.checkpoints.recorded.planned import Planned
from leansurgeon.reading.values import text


@dataclass(frozen=True)
class Cut:
    """The record of a surgery in the words of a report."""

    record: SurgeryRecord

    @property
    def plan(self) -> Planned:
        """The plan as it was carried out."""
        return self.record.plan

    @property
    def source(self) -> str:
        """What was cut."""
        return text(self.record.source.name, "?")

    @property
    def method(self) -> dict[str, str | int | float | bool]:
        """The settings of the plan's method, as they can be typed."""
        settings = self.plan.method.items()
        return {key: value if isinstance(value, int | float) else text(value) for key, value in settings}

    @cached_property
    def proven(self) -> str:
        """The sentence about the reload in a fresh process; empty without a proof."""
        proof = self.record.proof
        if proof is None:
            return ""
        return (
            f"Proof: reloaded in a fresh process with {text(proof.loaded_with, '?')}; "
            f"{proof.parameters:,} parameters, {proof.tensors}."
        )

    @cached_property
    def compared(self) -> str:
        """What the comparison with its source found; empty without one."""
        proof = self.record.proof
        return text(sentence(proof.compared, self.record.language)) if proof and proof.compared else ""

    @cached_property
    def starts(self) -> tuple[dict[str, str], ...]:
        """The cells of `shrink --compare`: source, fresh, naive and ours on the same held-out samples, before any
        training.
        """
        if not self.record.starts:
            return ()
        language = self.record.language
        named = [({"best": "ours"}.get(key, text(key)), start) for key, start in self.record.starts.items()]
        rows = [cells_of(name, start, language) for name, start in named]
        last = named[-1][1]
        if last.loss:
            rows.insert(0, cells_of("the source itself", last, language, "source"))
        return tuple({key: text(value) for key, value in row.items()} for row in rows)

    @property
    def changes_shape(self) -> bool:
        """Whether layers, heads or MLP differ between source and result."""
        return self.plan.before != self.plan.after


def cut_of(record: SurgeryRecord | None) -> Cut | None:
    """The record of a surgery in words; None where there is none, or nothing was planned."""
    return Cut(record) if record and record.plan else None


def judged_of(record: SurgeryRecord | None) -> tuple[tuple[str, str], ...]:
    """The data that a model was judged on, by name, and what was found, in a sentence; empty where nothing was."""
    if record is None:
        return ()
    return tuple((text(name), text(sentence(other, record.language))) for name, other in record.judged.items())
