"""Draw a model before and after its surgery to scale: a column for every layer, a cell for every head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import altair as alt

from leansurgeon.report.charts.forms import LIGHT, Chart, data, finish_chart
from leansurgeon.report.humans import count
from leansurgeon.report.rows import Section
from leansurgeon.report.runs import CutSummary
from leansurgeon.shape import Shape

STAYS, GOES, NEW = "stays", "is cut out", "new heads"
COLOURS = {STAYS: LIGHT["c0"], GOES: LIGHT["line"], NEW: LIGHT["c1"]}
CHANGES = (("depth", "layers"), ("heads", "heads"))
MOST = 4  # models of a section to draw
CELLS = 1_500  # with more heads than this, a layer is one bar
TALL, UNIT = 84.0, 9.0  # maximum height of the larger block, and of one head
ABOVE, BETWEEN, BELOW = 16.0, 24.0, 18.0  # text, lines from layer to layer, text


@dataclass(frozen=True)
class Block:
    """One of the two models: heads of every layer, and where its layers and heads begin."""

    heads: tuple[int, ...]
    left: float
    top: float
    unit: float

    @property
    def bottom(self) -> float:
        """Where its longest column ends."""
        return self.top + self.unit * max(self.heads)


def of_cuts(section: Section) -> list[Chart]:
    """Return charts for the first few models of a section whose layers or heads changed, if the kept layers are known.
    Skips experiments, whose many arms are described by tables.
    """
    charts: list[Chart] = []
    for row in section.rows if section.kind in ("models", "runs") else ():
        plan = row.cut and row.cut.plan
        if not plan or plan.before is None or plan.after is None or len(plan.layers) != plan.after.depth:
            continue
        if heads_of(plan.before) == heads_of(plan.after) or max(plan.layers) >= plan.before.depth:
            continue
        pairs = [(plan.before.column(key), plan.after.column(key), word) for key, word in CHANGES]
        changes = ", ".join(f"{old} to {new} {word}" for old, new, word in pairs if old != new)
        old, new = (side.get("total") for side in (plan.parameters_before, plan.parameters_after))
        says = f"{count(old)} parameters become {count(new)}." if old and new else ""
        says = f"{says} {row.cut.compared}".strip()
        charts.append(Chart(f"{row.name}-cut", f"{row.name}: {changes}", says, drawing(row.cut)))
    return charts[:MOST]


def heads_of(shape: Shape) -> tuple[int, ...]:
    """Return the number of heads of every layer."""
    return tuple(stage.heads for stage in shape.stages for _ in range(stage.depth))


def drawing(cut: CutSummary) -> alt.LayerChart:
    """Draw the source above, the result below, and a line from each kept layer to its new place."""
    before, after = heads_of(cut.plan.before), heads_of(cut.plan.after)
    unit = min(UNIT, TALL / max(*before, *after))
    source = Block(before, 0.0, ABOVE, unit)
    result = Block(after, (len(before) - len(after)) / 2, source.bottom + BETWEEN, unit)
    height = result.bottom + BELOW
    x = alt.Scale(domain=[0, len(before)], nice=False, zero=False)
    scale = alt.Scale(domain=[0, height], range=[0, height], nice=False, zero=False)
    place = {
        "x": alt.X("x:Q", scale=x, axis=None),
        "x2": "x2:Q",
        "y": alt.Y("y:Q", scale=scale, axis=None),
        "y2": "y2:Q",
    }
    marks = [*cells(source, cut, before=True), *cells(result, cut, before=False)]
    kinds = [what for what in COLOURS if any(mark["what"] == what for mark in marks)]
    legend = alt.Legend(orient="bottom", symbolStrokeWidth=0, symbolType="square")
    fill = alt.Color(
        "what:N", scale=alt.Scale(domain=kinds, range=[COLOURS[w] for w in kinds]), title=None, legend=legend
    )
    rects = alt.Chart(data(marks)).mark_rect().encode(**place, color=fill, description="says:N")
    ways = [
        {"x": kept + 0.5, "x2": result.left + i + 0.5, "y": source.bottom + 3, "y2": result.top - 3}
        for i, kept in enumerate(cut.plan.layers)
    ]
    rules = alt.Chart(data(ways)).mark_rule(color=LIGHT["quiet"], strokeWidth=0.7).encode(**place)
    words = [
        {"x": 0, "y": y, "text": f"{when}: {shape.depth} layers of {shape.column('heads')} heads"}
        for y, when, shape in (
            (ABOVE - 7, "before", cut.plan.before),
            (result.bottom + 11, "after", cut.plan.after),
        )
    ]
    labels = alt.Chart(data(words)).mark_text(align="left").encode(x=place["x"], y=place["y"], text="text:N")
    return finish_chart(alt.layer(rules, rects, labels), height=round(height))


def cells(block: Block, cut: CutSummary, *, before: bool) -> Iterator[dict[str, Any]]:
    """Yield a rectangle for every head of every layer; for large models one for every layer and kind."""
    whole = sum(block.heads) > CELLS
    old = heads_of(cut.plan.before)
    for i, heads in enumerate(block.heads):
        kinds = [GOES if before and i not in cut.plan.layers else STAYS] * heads
        if not before:
            kinds[min(heads, old[cut.plan.layers[i]]) :] = [NEW] * max(0, heads - old[cut.plan.layers[i]])
        runs = [(kind, kinds.index(kind), kinds.count(kind)) for kind in dict.fromkeys(kinds)] if whole else None
        for kind, first, many in runs or [(kind, j, 1) for j, kind in enumerate(kinds)]:
            top = block.top + first * block.unit
            yield {
                "what": kind,
                "x": block.left + i + 0.1,
                "x2": block.left + i + 0.9,
                "y": top,
                "y2": top + many * block.unit - min(1.0, block.unit / 4),
                "says": f"{'before' if before else 'after'}, layer {i + 1}, "
                f"{f'head {first + 1}' if many == 1 else f'{many} heads'}: {kind}",
            }
