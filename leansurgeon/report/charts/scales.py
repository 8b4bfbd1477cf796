"""Axes of charts: their labels and round ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import altair as alt

from leansurgeon.report.humans import plain_small

APART = 9  # units between points that would lie on each other
# Labels of ticks as Vega writes them.
PLAIN = (
    "datum.value != 0 && (abs(datum.value) >= 100000 || abs(datum.value) < 0.001) "
    "? format(datum.value, '.3~e') : format(datum.value, ',.6~r')"
)
PERCENT = "format(100 * datum.value, '.4~r') + ' %'"
COUNT = "replace(format(datum.value, '.3~s'), 'G', 'B')"
WHOLE = "format(datum.value, ',d')"


@dataclass(frozen=True)
class Axis:
    """`labels` is the expression that writes a tick."""

    title: str
    labels: str = PLAIN
    log: bool = False

    def says(self, value: float) -> str:
        """A value as text."""
        if self.labels == PERCENT:
            return f"{100 * value:.4g} %"
        return f"{value:,.0f}" if self.labels in (COUNT, WHOLE) else plain_small(value)

    def scale(self) -> alt.Scale:
        """A scale that holds every value, with a little room at both ends."""
        return (
            alt.Scale(type="log", nice=False, padding=10) if self.log else alt.Scale(zero=False, nice=False, padding=10)
        )

    def axis(self, values: Sequence[float] | None = None) -> alt.Axis:
        """Altair's axis with ticks at `values`, or about five of the library's choice."""
        given = {"values": list(values)} if values is not None else {"tickCount": 5}
        given |= {"tickMinStep": 1} if self.labels == WHOLE else {}
        return alt.Axis(labelExpr=self.labels, labelOverlap="greedy", labelFlush=False, **given)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, steps of 1, 2, 2.5 or 5 times a power of ten.

    >>> ticks(0.0, 1.0)
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    span = high - low
    if not span > 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(span / about))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if span / (power * m) <= about)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, with 2 and 5 between them where there are few; round numbers where even these are too few."""
    powers = range(math.floor(math.log10(low)), min(308, math.ceil(math.log10(high))) + 1)  # as far as numbers go
    for inner in ((1, 2, 5), (1, 3), (1,)):
        marks = [m * 10.0**p for p in powers for m in inner if low / 1.1 <= m * 10.0**p <= high * 1.1]
        if len(marks) <= 6:
            break
    return marks if len(marks) > 2 else ticks(low, high, 4)


def dodge(values: Sequence[float], width: float) -> list[float]:
    """By how many units each point moves along an axis of this width, so that those which would lie on each other
    stand side by side.
    """
    low, high = min(values), max(values)
    places = [(v - low) / (high - low) * width if high > low else 0.0 for v in values]
    moved = []
    for i, place in enumerate(places):
        near = [j for j, other in enumerate(places) if abs(other - place) < APART]
        moved.append((near.index(i) - (len(near) - 1) / 2) * APART)
    return moved
