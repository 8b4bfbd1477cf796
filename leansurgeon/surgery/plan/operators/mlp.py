"""Narrow or widen the feed-forward part.

Narrowing keeps the units whose weights are largest (product of the norms of what goes in and what comes out). Widening
is exact: new units have zero output.
"""

from __future__ import annotations

import numpy as np

from leansurgeon.checkpoints.recorded.planned import Step
from leansurgeon.surgery.plan.operators.heads import FRESH


def strongest(incoming: list[np.ndarray], outgoing: np.ndarray, keep: int) -> np.ndarray:
    """Indices of the `keep` strongest units in their old order. `incoming` are `(mlp, width)` matrices, `outgoing`
    is `(width, mlp)`.
    """
    score = np.linalg.norm(outgoing, axis=0)
    for matrix in incoming:
        score = score * np.linalg.norm(matrix, axis=1)
    return np.sort(np.argsort(-score, kind="stable")[:keep])


def widen(before: int, after: int) -> np.ndarray:
    """(after,) old unit of every new one, FRESH for the added ones."""
    index = np.full(after, FRESH)
    index[:before] = np.arange(before)
    return index


def operator(before: int, after: int, *, calibrated: bool = False) -> Step:
    """The step that trims or widens the MLP from `before` to `after` units."""
    settings = {"before": before, "after": after}
    if after < before:
        by = "that matter most on the calibration data" if calibrated else "with the largest weights"
        return Step("trim-mlp", "near", f"keep the {after} of {before} MLP units {by}", settings)
    return Step("widen-mlp", "exact", f"add {after - before} MLP units with zero output", settings)
