"""What a candidate is judged by, and how orders of candidates compare. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    """A metric on held-out samples. `error` is its standard error where it is a share of `samples` that were right;
    `spread` is the standard deviation over seeds where there were several.
    """

    value: float
    label: str
    higher: bool
    percent: bool
    loss: float | None = None
    samples: int | None = None
    error: float | None = None
    spread: float | None = None

    @property
    def key(self) -> tuple[float, float]:
        """The smaller, the better: the metric, then the loss."""
        return (-self.value if self.higher else self.value), self.loss if self.loss is not None else 0.0

    @property
    def text(self) -> str:
        """The value as a person reads it."""
        return f"{100 * self.value:.1f} %" if self.percent else f"{self.value:.4g}"


def binomial_error(value: float, samples: int) -> float:
    """Standard error of a share of `samples`; moved by half a sample, so that 100 % of few is not certain."""
    p = (value * samples + 0.5) / (samples + 1)
    return math.sqrt(p * (1 - p) / samples)


# -- orders ---------------------------------------------------------------------------------------


def kendall_tau(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Kendall's tau-b (1945) of two lists of numbers for the same things: 1 the same order, -1 the reverse, pairs that
    are equal in one list count half. None where one list has a single value.

    >>> kendall_tau([1, 2, 3], [1, 3, 2])
    0.3333333333333333
    """
    pairs = [(i, j) for j in range(len(a)) for i in range(j)]
    concordant = sum(sign(a[i] - a[j]) * sign(b[i] - b[j]) for i, j in pairs)
    sizes = [sum(x[i] != x[j] for i, j in pairs) for x in (a, b)]
    return concordant / math.sqrt(sizes[0] * sizes[1]) if all(sizes) else None


def sign(x: float) -> int:
    """-1, 0 or 1."""
    return (x > 0) - (x < 0)


def ranks(values: Sequence[float]) -> list[float]:
    """1 for the smallest; equal ones share the mean of their places."""
    order = sorted(values)
    return [order.index(v) + 1 + (order.count(v) - 1) / 2 for v in values]


def moves(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, int]:
    """By how many places each name of both orders moved up (the smaller value stands higher), counted among these
    alone; equal values stand in the order of `before`.
    """
    names = [name for name in before if name in after]
    first = sorted(names, key=lambda n: before[n])
    then = sorted(first, key=lambda n: after[n])
    return {name: first.index(name) - then.index(name) for name in names}


def front(points: Mapping[str, tuple[Sequence[float], Sequence[tuple[float, float]]]]) -> list[str]:
    """Names that nothing dominates. A point is (costs, score keys by rung), the smaller the better.

    Two candidates are compared on the last rung that both were tried on, since a longer training is no merit of a
    shape; one dominates the other if it is nowhere worse and somewhere better.
    """

    def dominates(a: str, b: str) -> bool:
        (cost_a, keys_a), (cost_b, keys_b) = points[a], points[b]
        shared = min(len(keys_a), len(keys_b)) - 1
        if shared < 0:
            return False
        x, y = (*cost_a, keys_a[shared]), (*cost_b, keys_b[shared])
        return all(p <= q for p, q in zip(x, y, strict=True)) and x != y

    return [b for b in points if points[b][1] and not any(dominates(a, b) for a in points if a != b)]
