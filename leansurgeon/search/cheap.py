"""The cheap stage: score shapes before they are built, and choose which to try. No torch.

    parameters   exact
    memory       predicted peak of training, for shapes that are tried (`outcome`)
    latency      of a forward pass of one sample, measured if it is limited (`outcome`)
    influence    share of the source's influence that the most influential layers keep
    kappa        of the kept layers, scaled by the number of heads as for Gaussian matrices (Theorem 3.2)

None of them is reliable: the report says how the order changed with the real scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING

from leansurgeon.checkpoints.source import Source
from leansurgeon.search.space import Candidate
from leansurgeon.shape import Shape, evenly_per_stage

if TYPE_CHECKING:
    from leansurgeon.search.evidence import Evidence

CONTROLS = 4  # one candidate in this many has the old number of heads
# Which direction is better: -1 for more (more parameters under the same limit can hold more).
WISHES = {"parameters": -1, "influence": -1, "kappa": 1}
EDELMAN = math.exp(1.537)  # a square Gaussian matrix of size n has kappa exp(1.537) n (Edelman, 1988; geometric mean)


@dataclass(frozen=True)
class CheapScores:
    """Cheap scores of one candidate; None if unknown."""

    parameters: int
    memory: int | None = None
    latency: float | None = None
    influence: float | None = None
    kappa: float | None = None


def scores(source: Source, candidates: Sequence[Candidate], evidence: Evidence | None) -> dict[str, CheapScores]:
    """Return all scores except memory and latency, by name."""
    numbers = {candidate.name: CheapScores(candidate.parameters) for candidate in candidates}
    if evidence is None:
        return numbers
    total = sum(evidence.influence or ())
    for candidate in candidates:
        kept = keep_most_influential(source.shape, candidate.shape, evidence.influence)
        influence = sum(evidence.influence[i] for i in kept) / total if total else None
        kappas = []  # the source's, scaled by Theorem 3.2 to the new inner width
        for layer in kept:
            old, new = (shape.stages[source.shape.stage_of(layer)].inner for shape in (source.shape, candidate.shape))
            if (kappa := evidence.kappa[layer]) is not None:
                ratio = gaussian_kappa(evidence.tokens, new) / gaussian_kappa(evidence.tokens, old)
                kappas.append(max(1.0, kappa * ratio))
        foretold = median(kappas) if kappas else None
        numbers[candidate.name] = CheapScores(candidate.parameters, influence=influence, kappa=foretold)
    return numbers


def keep_most_influential(before: Shape, after: Shape, influence: list[float] | None) -> list[int]:
    """Return the most influential layers of every stage, as layers of the model; evenly spaced if influence is
    unknown.
    """
    if not influence:
        return list(evenly_per_stage(before, after))
    kept = []
    for span, new in zip(before.spans, after.stages, strict=True):
        kept += sorted(sorted(span, key=lambda i: (-influence[i], i))[: new.depth])
    return kept


def gaussian_kappa(tokens: float, inner: float) -> float:
    """Return the condition number of a Gaussian (tokens, inner) matrix: (sqrt(a) + sqrt(b)) / (sqrt(a) - sqrt(b)) for
    large sizes a > b (Theorem 3.2). It diverges at a = b, where the value of a square matrix applies.
    """
    a, b = math.sqrt(max(tokens, inner)), math.sqrt(min(tokens, inner))
    square = EDELMAN * b * b
    return min(square, (a + b) / (a - b)) if a > b else square


# -- which to try --------------------------------------------------------------------------------


def order(candidates: Sequence[Candidate], numbers: dict[str, CheapScores]) -> list[Candidate]:
    """Sort candidates by the mean of their ranks in parameters (more is better under a limit), influence (more) and
    kappa (less), as far as known; on ties the smaller one first.
    """
    from scipy.stats import rankdata  # takes a second

    tables = []
    for key, wish in WISHES.items():
        values = [getattr(numbers[c.name], key) for c in candidates]
        if all(value is not None for value in values):
            tables.append(rankdata([wish * value for value in values]))
    points = {c.name: fmean(float(table[i]) for table in tables) for i, c in enumerate(candidates)}
    return sorted(candidates, key=lambda c: (points[c.name], c.parameters, c.name))


def old_heads(tries: int) -> int:
    """Return how many places are for candidates with the old number of heads, so that depth alone is always tried."""
    return -(-tries // CONTROLS) if tries > 1 else 0
