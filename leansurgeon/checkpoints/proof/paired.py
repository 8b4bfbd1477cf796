"""How certain a difference is that was seen on samples: both models saw the same ones, so their noise is shared."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

LEVEL = 0.95


def interval(differences: Sequence[float], counts: Sequence[float] | None = None) -> tuple[float, float] | None:
    """Where the mean difference lies with 95 %: Student's t over samples, each of which adds its `differences[i]` over
    `counts[i]` labels (None: one each). None for fewer than two samples.

    The mean over labels is a ratio of two sums, and its variance that of the ratio made linear; where all samples
    count the same, this is the interval of the paired t test.
    """
    from scipy.special import stdtrit

    n = len(differences)
    weights = [1.0] * n if counts is None else counts
    total = sum(weights)
    if n < 2 or not total:
        return None
    mean = sum(differences) / total
    rest = sum((d - mean * c) ** 2 for d, c in zip(differences, weights, strict=True))
    half = float(stdtrit(n - 1, (1 + LEVEL) / 2)) * sqrt(n / (n - 1) * rest) / total
    return mean - half, mean + half
