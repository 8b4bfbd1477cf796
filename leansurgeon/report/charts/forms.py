"""Chart specifications from numbers: colors and axes, lines and points, a heat map. Nothing is ever clipped.

A drawing is 360 units wide, about as a phone, so that its text stays readable there; wider screens show several side by
side. Every mark carries its own numbers (channel `description`).
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import altair as alt

from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.report.humans import plain_small

# name -> (light, dark). Contrast with both backgrounds is at least 4.5 : 1 for text and 3 : 1 for lines (WCAG 2.2).
COLOURS = {
    "ground": ("#ffffff", "#14171c"),
    "raised": ("#f4f5f7", "#1e232b"),
    "text": ("#1b1f24", "#e7eaee"),
    "quiet": ("#57606a", "#a3acb8"),
    "line": ("#d0d5dc", "#3a424e"),
    "link": ("#0a58b0", "#7db8f5"),
    "warn": ("#93380c", "#ffab7d"),
    "c0": ("#0b62b0", "#6db3f2"),
    "c1": ("#b5440c", "#ff9a6b"),
    "c2": ("#067355", "#4fcfa5"),
    "c3": ("#8b3f97", "#d69ae0"),
    "c4": ("#7a5d00", "#e3bb54"),
    "c5": ("#4a5560", "#c4ccd6"),
}
SERIES = 6  # c0 to c5; further series reuse them with other dashes and marks
DASHES = ((1, 0), (7, 3), (2, 3), (9, 3, 2, 3), (15, 4), (9, 3, 2, 3, 2, 3))
MARKS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")
LIGHT = {name: pair[0] for name, pair in COLOURS.items()}


APART = 9  # units between points that would overlap
# Tick labels, as Vega expressions.
PLAIN = (
    "datum.value != 0 && (abs(datum.value) >= 100000 || abs(datum.value) < 0.001) "
    "? format(datum.value, '.3~e') : format(datum.value, ',.6~r')"
)
PERCENT = "format(100 * datum.value, '.4~r') + ' %'"
COUNT = "replace(format(datum.value, '.3~s'), 'G', 'B')"
WHOLE = "format(datum.value, ',d')"


@dataclass(frozen=True)
class Axis:
    """A chart's axis; `labels` is the Vega expression that writes a tick."""

    title: str
    labels: str = PLAIN
    log: bool = False

    def says(self, value: float) -> str:
        """Return a value as text."""
        if self.labels == PERCENT:
            return f"{100 * value:.4g} %"
        return f"{value:,.0f}" if self.labels in (COUNT, WHOLE) else plain_small(value)

    def channel(self, kind: type[alt.X | alt.Y], field: str) -> alt.X | alt.Y:
        """Return a field as x or y: a scale that holds every value with a little room at both ends, and about five
        ticks.
        """
        ends = {"type": "log"} if self.log else {"zero": False}
        least = {"tickMinStep": 1} if self.labels == WHOLE else {}
        axis = alt.Axis(labelExpr=self.labels, labelOverlap="greedy", labelFlush=False, tickCount=5, **least)
        return kind(field, title=self.title, scale=alt.Scale(**ends, nice=False, padding=10), axis=axis)


WIDTH, HEIGHT = 360, 180
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif'
ABOUT = 6.2  # average width of a letter
SHIFT = {"expr": "datum.shift"}
Channels: TypeAlias = dict[str, Any]  # of an Altair encoding: color, dash, shape


@dataclass(frozen=True)
class Point:
    """A point of a series. `low` and `high` are the ends of its error bar; `bound` says that `y` is a lower bound."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    bound: bool = False


@dataclass(frozen=True)
class Series:
    """Points with one name. `style` selects color, dash and mark; several series may share name and style. A single
    point always has its mark.
    """

    name: str
    points: tuple[Point, ...]
    style: int = 0
    joined: bool = True
    marks: bool = True


@dataclass(frozen=True)
class Chart:
    """A chart with its text: `key` names its file, `says` is shown under the title. A notebook can display it."""

    key: str
    title: str
    says: str
    drawing: alt.LayerChart

    @cached_property
    def spec(self) -> JsonObject:
        """The Vega-Lite specification with all its data."""
        return self.drawing.to_dict()

    @cached_property
    def svg(self) -> str:
        """The drawing as the text of an SVG file."""
        file = io.StringIO()
        self.drawing.save(file, format="svg")
        return file.getvalue()

    def _repr_svg_(self) -> str:
        return self.svg


def data(rows: Sequence[dict[str, Any]]) -> alt.Data:
    """Return rows as inline Vega-Lite data, so that a drawing needs no other file."""
    return alt.Data(values=list(rows))


def style_channels(names: Sequence[tuple[str, int]], *, marks: bool = True) -> Channels:
    """Return the channels color, dash and shape for names and their styles, with one legend under the drawing: of marks
    if there are any, else of lines.
    """
    domain = [name for name, _ in names]
    widest = max(map(len, domain), default=0) * ABOUT + 36
    key = alt.Legend(
        orient="bottom",
        columns=max(1, int(WIDTH // widest)),
        labelLimit=0,
        symbolSize=90,
        columnPadding=16,
        **({"symbolStrokeWidth": 0} if marks else {}),  # else the dashes of a line would surround its mark
    )

    def channel(kind: type, looks: list[Any], legend: bool) -> alt.Color | alt.StrokeDash | alt.Shape:
        """Return one of the three channels, with the look of every name."""
        scale = alt.Scale(domain=domain, range=looks)
        return kind("name:N", scale=scale, title=None, legend=key if legend and len(domain) > 1 else None)

    # All six dashes and marks differ, and each reuse of the colors shifts them by one.
    forms = [(style + style // SERIES) % SERIES for _, style in names]
    return {
        "color": channel(alt.Color, [LIGHT[f"c{style % SERIES}"] for _, style in names], True),
        "dash": channel(alt.StrokeDash, [list(DASHES[form]) for form in forms], not marks),
        "shape": channel(alt.Shape, [MARKS[form] for form in forms], marks),
    }


def lines(series: Sequence[Series], x: Axis, y: Axis) -> alt.LayerChart | None:
    """Draw series as lines, points (hollow for a bound), or both, with error bars; None without a point. A logarithmic
    axis becomes linear if a value is not positive.
    """
    series = [s for s in series if s.points]
    if not series:
        return None
    drawn = [(i, s, p) for i, s in enumerate(series) for p in s.points]
    shifts = [0.0] * len(drawn)
    if not any(s.joined for s in series):  # points that would overlap move side by side
        low, high = (end(p.x for _, _, p in drawn) for end in (min, max))
        places = [(p.x - low) / (high - low) * (WIDTH - 80) if high > low else 0.0 for _, _, p in drawn]
        for i, place in enumerate(places):
            near = [j for j, other in enumerate(places) if abs(other - place) < APART]
            shifts[i] = (near.index(i) - (len(near) - 1) / 2) * APART
    rows = [
        {
            "name": s.name,
            "line": i,
            "joined": s.joined,
            "mark": s.marks or len(s.points) == 1,
            "x": p.x,
            "y": p.y,
            "low": p.y if p.low is None else p.low,
            "high": p.y if p.high is None else p.high,
            "bound": p.bound,
            "shift": shift,
            "says": f"{s.name}, {x.says(p.x)}: {'at least ' if p.bound else ''}{y.says(p.y)}",
        }
        for (i, s, p), shift in zip(drawn, shifts, strict=True)
    ]
    names = list(dict.fromkeys((s.name, s.style) for s in series))
    styles = style_channels(names, marks=any(row["mark"] for row in rows))
    if y.log and min(row["low"] for row in rows) <= 0:
        y = Axis(y.title, y.labels)
    place, layers = {"x": x.channel(alt.X, "x:Q"), "y": y.channel(alt.Y, "y:Q")}, []
    if bars := [row for row in rows if row["low"] != row["high"]]:
        ends = {"y": alt.Y("low:Q", scale=place["y"]["scale"], title=y.title), "y2": "high:Q"}
        rule = alt.Chart(data(bars)).mark_rule(strokeWidth=2, xOffset=SHIFT)
        layers.append(rule.encode(x=place["x"], color=styles["color"], **ends))
    if joined := [row for row in rows if row["joined"]]:
        line = alt.Chart(data(joined)).mark_line(strokeWidth=2, strokeJoin="round")
        layers.append(line.encode(**place, detail="line:N", color=styles["color"], strokeDash=styles["dash"]))
    hollow = {"filled": False, "fill": LIGHT["ground"], "strokeWidth": 1.5}
    for bound, look in ((False, {"filled": True}), (True, hollow)):
        if some := [row for row in rows if row["mark"] and row["bound"] is bound]:
            point = alt.Chart(data(some)).mark_point(size=42, opacity=1, xOffset=SHIFT, **look)
            said = alt.Description("says:N")
            layers.append(point.encode(**place, color=styles["color"], shape=styles["shape"], description=said))
    return finish_chart(alt.layer(*layers))


def cells(rows: Sequence[tuple[str, Sequence[float]]], across: str, down: str) -> alt.LayerChart:
    """Draw a heat map of non-negative numbers, darker for larger ones, with a name before every row."""
    known = [value for _, row in rows for value in row]
    high, total = max(known, default=0.0) or 1.0, sum(known) or 1.0
    made = [
        {
            "row": name,
            "column": head,
            "value": value,
            "says": f"{down} {name}, {across} {head}: {plain_small(value)} ({100 * value / total:.1f} % of all)",
        }
        for name, row in rows
        for head, value in enumerate(row, 1)
    ]
    x = alt.X("column:O", title=across, axis=alt.Axis(labelAngle=0, labelOverlap="greedy", ticks=False, domain=False))
    axis = alt.Axis(ticks=False, domain=False, labelLimit=0)
    y = alt.Y("row:N", title=down, sort=[name for name, _ in rows], axis=axis)
    opacity = alt.FillOpacity("value:Q", scale=alt.Scale(domain=[0, high], range=[0, 1]), legend=None)
    drawing = alt.Chart(data(made)).mark_rect(fill=LIGHT["c0"], stroke=LIGHT["line"], strokeWidth=0.5)
    drawing = drawing.encode(x=x, y=y, fillOpacity=opacity, description="says:N")
    height = max(14, min(26, 300 // max(len(row) for _, row in rows))) * len(rows)
    return finish_chart(alt.layer(drawing), height=height)


def finish_chart(drawing: alt.LayerChart, height: int = HEIGHT) -> alt.LayerChart:
    """Set size, fonts and muted colors; `render` replaces them with the page's own."""
    quiet = {"labelColor": LIGHT["quiet"], "titleColor": LIGHT["quiet"], "gridColor": LIGHT["line"]}
    quiet |= {"domainColor": LIGHT["line"], "tickColor": LIGHT["line"], "labelFontSize": 11, "titleFontSize": 11}
    legend = {"labelColor": LIGHT["text"], "labelFontSize": 11, "symbolStrokeWidth": 2, "rowPadding": 3}
    fit = alt.AutoSizeParams(type="fit-x", contains="padding")
    return (
        drawing.properties(width=WIDTH, height=height, autosize=fit, background="transparent")
        .configure(font=FONT, padding=4, axis=quiet | {"titleFontWeight": "normal", "titlePadding": 12}, legend=legend)
        .configure_view(stroke=None)
        .configure_text(color=LIGHT["text"], fontSize=11)
    )
