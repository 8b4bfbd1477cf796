"""Charts as SVG text: lines, points with error bars, stacked bars, a map of cells. Pure functions of their numbers.

Colours are classes (`html_style`), so that one drawing serves light, dark and paper. A drawing is 360 units wide, about
as a phone, so that its letters stay readable there; wider screens put several side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from leansurgeon.report.html import Child, Markup, join, tag
from leansurgeon.report.html_style import SERIES
from leansurgeon.report.humans import plain

WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 10, 36
APART = 9  # units between points that would lie on each other
# Colour alone must not tell series apart: as many dashes and marks as colours (`form`).
DASHES = (None, "7 3", "2 3", "9 3 2 3", "15 4", "9 3 2 3 2 3")
CROSS = ((-1, -4), (1, -4), (1, -1), (4, -1), (4, 1), (1, 1), (1, 4), (-1, 4), (-1, 1), (-4, 1), (-4, -1), (-1, -1))
Format = Callable[[float], str]
Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Series:
    """One arm of a chart. `points` are (x, y), `errors` half the height of a bar at each (0: none), `hollow` the points
    that are only a lower bound. `style` picks colour, dash and mark; several series may share one.
    """

    name: str
    points: Points
    style: int = 0
    errors: tuple[float, ...] = ()
    hollow: tuple[bool, ...] = ()


# -- scales ---------------------------------------------------------------------------------------


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
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for inner in ((1, 2, 5), (1, 3), (1,)):
        found = [m * 10.0**p for p in powers for m in inner if low <= m * 10.0**p * 1.0001 and m * 10.0**p <= high]
        if len(found) <= 6:
            break
    return found if len(found) > 2 else ticks(low, high, 4)


@dataclass(frozen=True)
class Scale:
    """From numbers to places: `low` lies at `start`, `high` at `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + share * (self.end - self.start), 2)

    @property
    def ticks(self) -> list[float]:
        return log_ticks(self.low, self.high) if self.log else ticks(self.low, self.high)


def scale(values: Sequence[float], start: float, end: float, *, log: bool = False, zero: bool = False) -> Scale:
    """A scale that holds all values with a little room around them; with `zero` it begins at 0."""
    low, high = min(values), max(values)
    if log:
        return Scale(low / 1.15, high * 1.15, start, end, True)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return Scale(0.0 if zero else low - room, high + room, start, end)


# -- pieces ---------------------------------------------------------------------------------------


def drawing(says: str, height: float, *children: Child, width: float = WIDTH) -> Markup:
    """An image with a sentence for those who do not see it."""
    return tag(
        "svg",
        tag("title", says),
        children,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=says,
    )


def form(style: int) -> int:
    """Which dash and mark a style has: all six differ, and where colours begin again, the next one goes with each."""
    return (style + style // SERIES) % SERIES


def mark(x: float, y: float, style: int, hollow: bool = False) -> Markup:
    """A circle, a polygon or a cross of about 7 units; hollow where the value is only a bound."""
    class_ = f"mark s{style % SERIES} {'hollow' if hollow else f'f{style % SERIES}'}"
    if form(style) == 0:
        return tag("circle", cx=x, cy=y, r=3.2, class_=class_)
    corners = {
        1: ((-3, -3), (3, -3), (3, 3), (-3, 3)),
        2: ((0, -4), (3.6, 3), (-3.6, 3)),
        3: ((0, -4.2), (4.2, 0), (0, 4.2), (-4.2, 0)),
        4: ((0, 4), (3.6, -3), (-3.6, -3)),
        5: CROSS,
    }[form(style)]
    return tag("polygon", points=" ".join(f"{x + a:.2f},{y + b:.2f}" for a, b in corners), class_=class_)


def legend(names: Sequence[tuple[str, int]], *, lines: bool = True) -> Markup | None:
    """Name and look of every series, as text beside the drawing, where it can wrap."""
    if len(names) < 2:
        return None

    def sample(style: int) -> Markup:
        stroke = tag(
            "path", d="M0 6H28", class_=f"plot s{style % SERIES}", fill="none", stroke_dasharray=DASHES[form(style)]
        )
        return tag("svg", stroke if lines else None, mark(14, 6, style), viewBox="0 0 28 12", aria_hidden="true")

    return tag("ul", [tag("li", sample(style), name) for name, style in names], class_="legend")


def figure(title: str, says: str, image: Markup, key: Markup | None = None) -> Markup:
    return tag("figure", tag("figcaption", tag("b", title), says), image, key)


def axes(x: Scale, y: Scale, x_label: str, y_label: str, x_format: Format, y_format: Format) -> Markup:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    across = [
        join(
            tag("path", d=f"M{LEFT} {y(v):g}H{right}", class_="grid"),
            tag("text", y_format(v), x=LEFT - 5, y=y(v) + 4, text_anchor="end", class_="tick"),
        )
        for v in y.ticks
    ]
    down = [
        join(
            tag("path", d=f"M{x(v):g} {bottom}v4", class_="grid"),
            tag("text", x_format(v), x=x(v), y=bottom + 15, text_anchor="middle", class_="tick"),
        )
        for v in x.ticks
    ]
    base = tag("path", d=f"M{LEFT} {bottom}H{right}", class_="grid")
    below = tag("text", x_label, x=(LEFT + right) / 2, y=HEIGHT - 4, text_anchor="middle", class_="tick")
    beside = tag(
        "text",
        y_label,
        x=10,
        y=(TOP + bottom) / 2,
        text_anchor="middle",
        class_="tick",
        transform=f"rotate(-90 10 {(TOP + bottom) / 2:g})",
    )
    return tag("g", across, down, base, below, beside, aria_hidden="true")


# -- charts ---------------------------------------------------------------------------------------


def chart(
    found: Sequence[Series],
    title: str,
    says: str,
    *,
    x_label: str,
    y_label: str,
    x_format: Format | None = None,
    y_format: Format | None = None,
    lines: bool = True,
    marks: bool = True,
    log: bool = False,
    whole_x: bool = False,
) -> Markup | None:
    """Series as lines, points, or both, in a figure with its legend; None without a point.

    `log` is for the vertical axis and leaves out what is not positive. `whole_x` puts ticks on whole numbers only.
    """
    if log:
        found = [positive(s) for s in found]
    found = [s for s in found if s.points]
    if not found:
        return None
    errors = [e for s in found for e in (s.errors or (0.0,) * len(s.points))]
    points = [p for s in found for p in s.points]
    x = scale([p[0] for p in points], LEFT + 4, WIDTH - RIGHT)
    reach = [v for (_, b), e in zip(points, errors, strict=True) for v in (b - e, b + e)]
    y = scale(reach, HEIGHT - BOTTOM, TOP, log=log)
    body: list[Markup] = []
    places = dodged([x(a) for a, _ in points])
    for s in found:
        at = [(x(a), y(b)) for a, b in s.points] if lines else [(places.pop(0), y(b)) for _, b in s.points]
        if lines and len(at) > 1:
            way = "M" + "L".join(f"{a:g} {b:g}" for a, b in at)
            look = f"plot s{s.style % SERIES}"
            body.append(tag("path", d=way, class_=look, fill="none", stroke_dasharray=DASHES[form(s.style)]))
        for (_, b), (px, _), e in zip(s.points, at, s.errors, strict=False):
            if e:
                body.append(tag("path", d=f"M{px:g} {y(b - e):g}V{y(b + e):g}", class_=f"plot s{s.style % SERIES}"))
        if marks or len(at) == 1:
            hollow = s.hollow or (False,) * len(at)
            body += [mark(a, b, s.style, h) for (a, b), h in zip(at, hollow, strict=True)]
    across = Whole(x.low, x.high, x.start, x.end) if whole_x else x
    frame = axes(across, y, x_label, y_label, x_format or plain_small, y_format or plain_small)
    names = list(dict.fromkeys((s.name, s.style) for s in found))
    return figure(title, says, drawing(f"{title}. {says}", HEIGHT, frame, body), legend(names, lines=lines))


def dodged(places: list[float]) -> list[float]:
    """Places of points along an axis; those that would lie on each other stand side by side."""
    found = list(places)
    for i in range(len(places)):
        near = [j for j in range(len(places)) if abs(places[j] - places[i]) < APART]
        found[i] = round(places[i] + (near.index(i) - (len(near) - 1) / 2) * APART, 2)
    return found


class Whole(Scale):
    """A scale with ticks on whole numbers."""

    @property
    def ticks(self) -> list[float]:
        around = ticks(self.low, self.high, 8)
        step = max(1, int(around[1] - around[0])) if len(around) > 1 else 1
        return [float(t) for t in range(math.ceil(self.low / step) * step, math.floor(self.high) + 1, step)]


def cropped(found: Sequence[Series], higher_is_better: bool) -> tuple[list[Series], float | None]:
    """Series without their first steep way, where it would squeeze all else, and the value at which they are cut.

    What comes after a fifth of the training is drawn, and before it what is no further off than that spans; the edge
    is None where nothing is cut, as where no line would be left of trainings that were evaluated twice.
    """
    ends = [[b for a, b in s.points if a >= 0.2 * max(p[0] for p in s.points)] for s in found]
    late, every = [b for end in ends for b in end], [b for s in found for _, b in s.points]
    if max(map(len, ends), default=0) < 2 or max(late) - min(late) > 0.5 * (max(every) - min(every)):
        return list(found), None
    sign, span = 1 if higher_is_better else -1, max(late) - min(late)
    limit = min(sign * b for b in late) - span
    edge = sign * min(sign * b for b in every if sign * b >= limit)
    return [Series(s.name, above(s.points, edge, sign), s.style) for s in found], edge


def above(points: Points, edge: float, sign: int) -> Points:
    """The part of a line on the good side of `edge`, from where it crosses it for the first time."""
    for i, (a, b) in enumerate(points):
        if sign * (b - edge) >= 0:
            if not i or b == edge:
                return points[i:]
            c, d = points[i - 1]
            share = (edge - d) / (b - d)
            return ((c + share * (a - c), edge), *points[i:])
    return ()


def positive(s: Series) -> Series:
    keep = [i for i, (_, b) in enumerate(s.points) if b > 0]

    def of(values: tuple) -> tuple:
        return tuple(values[i] for i in keep) if values else ()

    return Series(s.name, of(s.points), s.style, of(s.errors), of(s.hollow))


def bars(rows: Sequence[tuple[str, Sequence[float]]], parts: Sequence[str], title: str, says: str, show: Format):
    """Stacked bars, one below the other: name and sum above each, its parts in it. None without a row."""
    largest = max((sum(values) for _, values in rows), default=0)
    if largest <= 0:
        return None
    body, top = [], 0.0
    for name, values in rows:
        body.append(tag("text", name, x=0, y=top + 11))
        body.append(tag("text", show(sum(values)), x=WIDTH, y=top + 11, text_anchor="end"))
        at = 0.0
        for i, value in enumerate(values):
            wide = value / largest * WIDTH
            said = tag("title", f"{name}, {parts[i]}: {show(value)}")
            body.append(
                tag("rect", said, x=f"{at:.2f}", y=top + 16, width=f"{wide:.2f}", height=12, class_=f"f{i % SERIES}")
            )
            at += wide
        top += 36
    key = [(part, i) for i, part in enumerate(parts)]
    swatches = [tag("li", swatch(i), part) for part, i in key] if len(parts) > 1 else []
    return figure(
        title, says, drawing(f"{title}. {says}", top, body), tag("ul", swatches, class_="legend") if swatches else None
    )


def swatch(style: int) -> Markup:
    square = tag("rect", x=8, y=0, width=12, height=12, class_=f"f{style % SERIES}")
    return tag("svg", square, viewBox="0 0 28 12", aria_hidden="true")


def cell_map(
    rows: Sequence[tuple[str, Sequence[float | None]]], title: str, says: str, x_label: str, y_label: str
) -> Markup:
    """A map of numbers from 0 on, fuller is larger, with a name before every row; each cell says its number.

    None (or less than 0) is crossed out.
    """
    known = [v for _, row in rows for v in row if v is not None and v >= 0]
    high, across = max(known, default=0.0) or 1.0, max((len(row) for _, row in rows), default=0) or 1
    side = min(26.0, (WIDTH - LEFT - 2) / across)
    tall = min(26.0, max(14.0, side))
    bottom, body = len(rows) * tall, []
    for i, (name, row) in enumerate(rows):
        body.append(label(name, LEFT - 5, i * tall + tall / 2 + 4, "end"))
        for j, value in enumerate(row):
            lacks = value is None or value < 0
            said = f"{y_label} {name}, {x_label} {j + 1}: {'not measured' if lacks else plain_small(value)}"
            x, y = f"{LEFT + j * side:.2f}", f"{i * tall:.2f}"
            look = {"class_": "cell", "fill_opacity": f"{0 if lacks else value / high:.3f}"}
            body.append(tag("rect", tag("title", said), x=x, y=y, width=f"{side:.2f}", height=f"{tall:.2f}", **look))
            if lacks:
                body.append(tag("path", d=f"M{x} {y}l{side:.2f} {tall:.2f}", class_="grid"))
    for j in range(0, across, max(1, math.ceil(16 / side))):
        body.append(label(str(j + 1), LEFT + (j + 0.5) * side, bottom + 13, "middle"))
    body.append(label(x_label, LEFT + across * side / 2, bottom + 28, "middle"))
    body.append(label(y_label, 10, bottom / 2, "middle", f"rotate(-90 10 {bottom / 2:g})"))
    return figure(title, says, drawing(f"{title}. {says}", bottom + 34, body))


def label(text: str, x: float, y: float, anchor: str, transform: str | None = None) -> Markup:
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, class_="tick", transform=transform)


def plain_small(value: float) -> str:
    """Three significant digits, also below 1: `0.00123`, `20`, `1,000`, `3.1e7`."""
    return plain(value) if abs(value) >= 1000 else f"{value:.3g}"
