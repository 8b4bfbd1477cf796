"""The paper's row for an arm of ours, where the paper has the same model in the same shape. Counted without torch."""

from __future__ import annotations

from dataclasses import dataclass

from leansurgeon.report.evidence.run import SHAPE


@dataclass(frozen=True)
class Printed:
    """What the paper prints for a shape: where, the model's name, parameters as its text, score and memory (GB)."""

    where: str
    model: str
    parameters: str | None
    score_name: str
    score: float | None
    memory: float | None


def printed(preset: str, wanted: dict[str, str] | None) -> list[Printed]:
    """Every row of the paper's tables (not its figures, whose points are no text) with this preset and shape."""
    from leansurgeon import paper

    known = [(exhibit, r) for exhibit in paper.TABLES for r in exhibit.rows if r.preset == preset]
    if not known or not wanted:
        return []
    from leansurgeon.errors import LeanSurgeonError
    from leansurgeon.paper.audit import Start, target_of

    rows = []
    for exhibit, candidate in known:
        try:
            shape = target_of(Start(preset), candidate.words, candidate.policy).shape
        except LeanSurgeonError:
            continue
        if {key: shape.column(key) for key in SHAPE} == wanted:
            said = candidate.printed
            score = said.scores.get(exhibit.headline)
            model = f"{candidate.model}, {candidate.role}"
            rows.append(Printed(exhibit.name, model, said.parameters, exhibit.headline, score, said.memory))
    return rows
