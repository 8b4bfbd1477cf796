"""Axes of charts: their labels."""

from __future__ import annotations

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

    def axis(self) -> alt.Axis:
        """Altair's axis with about five ticks."""
        least = {"tickMinStep": 1} if self.labels == WHOLE else {}
        return alt.Axis(labelExpr=self.labels, labelOverlap="greedy", labelFlush=False, tickCount=5, **least)


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
