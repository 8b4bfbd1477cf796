"""The charts of a section: which numbers of its rows to draw, and the text under their titles; also the charts of
`leansurgeon heads`.

A row has the same look in all of them. A new chart is a function here, listed in `OF_SECTION`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import altair as alt

from leansurgeon.checkpoints.record import SurgeryRecord
from leansurgeon.errors import plural
from leansurgeon.report.charts.forms import (
    COUNT,
    LIGHT,
    PERCENT,
    PLAIN,
    WHOLE,
    Axis,
    Chart,
    Point,
    Series,
    cells,
    data,
    finish_chart,
    lines,
)
from leansurgeon.report.humans import Spread, count
from leansurgeon.report.kappa import Bound
from leansurgeon.report.rows import Row, Section
from leansurgeon.report.runs import HeadStudy, describe_comparison
from leansurgeon.shape import Shape

ONE_DEVIATION = "The bar is one standard deviation over seeds to each side."
KAPPA = (
    ("median", "Kappa of each layer", "Raw: of what enters the output projection, median over samples"),
    ("centred", "Kappa with the mean token subtracted", "Median over samples"),
    ("output", "Kappa of A W_o", "No change of basis of the heads moves it"),
    ("jacobian", "Kappa of the block's Jacobian", "No change of basis of the heads moves it"),
)


def of_section(section: Section, part: str) -> list[Chart]:
    """Return the charts of one part of a section ("Results", "Training curves", ...) that have something to show."""
    return [chart for draw in OF_SECTION.get(part, ()) for chart in draw(section)]


def every(section: Section) -> list[Chart]:
    """Return all charts of a section, in the order of the page's parts."""
    return [chart for part in OF_SECTION for chart in of_section(section, part)]


def styles(section: Section) -> Mapping[str, int]:
    """Return a style for every row of a section, the same in all its charts."""
    return {row.name: i for i, row in enumerate(section.rows)}


def metric_axis(section: Section) -> Axis:
    """Return the axis of the task's metric, in per cent if the metric is a share."""
    return Axis(section.task.label, PERCENT if section.task.percent else PLAIN)


def with_error(x: float, spread: Spread) -> Point:
    """Return a point at the mean over seeds, with a bar of one standard deviation up and down (none for one seed)."""
    sd = spread.sd or 0.0
    return Point(x, spread.mean, spread.mean - sd, spread.mean + sd)


def list_bounded_points(known: Iterable[tuple[float, Bound | None]]) -> tuple[Point, ...]:
    """Return points at the known values; lower bounds are marked as such."""
    return tuple(Point(x, bound.value, bound=not bound.exact) for x, bound in known if bound)


def draw_lines(key: str, title: str, says: str, series: list[Series], x: Axis, y: Axis) -> list[Chart]:
    """Return the chart of some series in a list; an empty list if there is nothing to draw."""
    drawing = lines(series, x, y)
    return [Chart(key, title, says, drawing)] if drawing is not None else []


# -- results --------------------------------------------------------------------------------------


def by_heads(section: Section) -> list[Chart]:
    """Draw the paper's figures 3 and 5, the metric and kappa against heads: one line for every depth."""
    curves, charts = list(enumerate(sweep(section).items())), []
    if section.task is not None:
        series = [
            Series(name, tuple(with_error(heads, row.metric) for heads, row in arms if row.metric), i)
            for i, (name, arms) in curves
        ]
        spread = any(p.low != p.high for s in series for p in s.points)
        says = f"{ONE_DEVIATION if spread else 'One seed each.'} Controls are left out."
        title = f"{section.task.label} against heads"
        charts += draw_lines("heads", title, says, series, Axis("heads", WHOLE), metric_axis(section))
    series = [
        Series(name, list_bounded_points((heads, row.kappa and row.kappa.median) for heads, row in arms), i)
        for i, (name, arms) in curves
    ]
    bounded = " Hollow: at least so much." if any(p.bound for s in series for p in s.points) else ""
    says = f"Median over layers, so compare along a curve and not between depths: kappa grows with depth.{bounded}"
    x, y = Axis("heads", WHOLE), Axis("kappa", log=True)
    return charts + draw_lines("heads-kappa", "Kappa against heads", says, series, x, y)


def metric_by_cost(section: Section) -> list[Chart]:
    """Draw the metric against parameters and, if the timed rows took turns, against the latency of one sample: a point
    for each row that has both, and a line at the original's metric.
    """
    costs = {"parameters": (Axis("parameters", COUNT), [row.parameters for row in section.rows])}
    if len({row.measured for row in section.rows if row.latency}) == 1:
        times = [row.latency and 1000 * row.latency.median for row in section.rows]
        costs["latency"] = Axis("ms for one sample"), times
    look, charts = styles(section), []
    for key, (axis, values) in costs.items():
        known = [(x, row) for x, row in zip(values, section.rows, strict=True) if row.metric and x]
        if section.task is None or len(known) < 2:
            continue
        series = [Series(row.name, (with_error(x, row.metric),), look[row.name], joined=False) for x, row in known]
        if section.original and section.original.metric:
            level = section.original.metric.mean
            points = tuple(Point(end(x for x, _ in known), level) for end in (min, max))
            series.append(Series(section.original.name, points, look[section.original.name], marks=False))
        spread = any(row.metric.sd for _, row in known)
        says = f"{ONE_DEVIATION if spread else 'One seed each.'} The line is the level of the original."
        title = f"{section.task.label} against {axis.title}"
        charts += draw_lines(key, title, says, series, axis, metric_axis(section))
    return charts


# -- training -------------------------------------------------------------------------------------


def by_epoch(section: Section) -> list[Chart]:
    """Draw the metric on the evaluation samples and the training loss (logarithmic axis) against epochs, a line for
    every seed whose folder has its curve.
    """
    loss = "Mean since the last time it was logged; arms may scale it differently (smoothing, distillation)."
    drawn = [("loss", "Training loss", loss, Axis("training loss", log=True))]
    if section.task:
        title = f"{section.task.label} during training"
        drawn.insert(0, ("metric", title, "On the evaluation samples.", metric_axis(section)))
    look, charts = styles(section), []
    for key, title, says, axis in drawn:
        series = [
            Series(row.name, tuple(Point(x, y) for x, y in points), look[row.name], marks=False)
            for row in section.rows
            for run in row.runs
            if run.curve is not None and (points := getattr(run.curve, key))
        ]
        says += " One line for every seed." if len(series) > len({s.name for s in series}) else ""
        charts += draw_lines(key, title, says, series, Axis("epoch"), axis)
    return charts


# -- conditioning ---------------------------------------------------------------------------------


def kappa_by_layer(section: Section) -> list[Chart]:
    """Draw condition numbers against layers, a chart for each kind that was measured."""
    look, charts = styles(section), []
    for key, title, says in KAPPA:
        series = [
            Series(
                row.name,
                list_bounded_points((one.layer, getattr(one, key)) for one in row.kappa.layers),
                look[row.name],
            )
            for row in section.rows
            if row.kappa
        ]
        says += "; hollow: at least so much." if any(p.bound for s in series for p in s.points) else "."
        charts += draw_lines(f"kappa-{key}", title, says, series, Axis("layer", WHOLE), Axis("kappa", log=True))
    return charts


# -- heads ---------------------------------------------------------------------------------------


def of_heads(section: Section) -> list[Chart]:
    """Draw importance maps and pruning curves of every row that has them, for its first seed that does."""
    charts = []
    for row in section.rows:
        run = next((run for run in row.runs if run.heads), None)
        if run:
            seed = f", seed {run.summary.seed}" if run.summary.seed is not None else ""
            charts += head_charts(run.heads, f"{row.name}{seed}", f"{row.name}-")
    return charts


# -- cuts: a model before and after to scale, a column for every layer, a cell for every head --------

STAYS, GOES, NEW = "stays", "is cut out", "new heads"
CELL_COLOURS = {STAYS: LIGHT["c0"], GOES: LIGHT["line"], NEW: LIGHT["c1"]}
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
    charts = []
    for row in section.rows if section.kind in ("models", "runs") else ():
        plan = row.cut and row.cut.plan
        if not plan or plan.before is None or plan.after is None or len(plan.layers) != plan.after.depth:
            continue
        if list_heads(plan.before) == list_heads(plan.after) or max(plan.layers) >= plan.before.depth:
            continue
        pairs = [(plan.before.column(key), plan.after.column(key), word) for key, word in CHANGES]
        changes = ", ".join(f"{old} to {new} {word}" for old, new, word in pairs if old != new)
        old, new = (side.get("total") for side in (plan.parameters_before, plan.parameters_after))
        says = f"{count(old)} parameters become {count(new)}." if old and new else ""
        says = f"{says} {describe_comparison(row.cut)}".strip()
        charts.append(Chart(f"{row.name}-cut", f"{row.name}: {changes}", says, draw_cut(row.cut)))
    return charts[:MOST]


def list_heads(shape: Shape) -> tuple[int, ...]:
    """Return the number of heads of every layer."""
    return tuple(stage.heads for stage in shape.stages for _ in range(stage.depth))


def draw_cut(cut: SurgeryRecord) -> alt.LayerChart:
    """Draw the source above, the result below, and a line from each kept layer to its new place."""
    before, after = list_heads(cut.plan.before), list_heads(cut.plan.after)
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
    marks = [*draw_cells(source, cut, before=True), *draw_cells(result, cut, before=False)]
    kinds = [what for what in CELL_COLOURS if any(mark["what"] == what for mark in marks)]
    legend = alt.Legend(orient="bottom", symbolStrokeWidth=0, symbolType="square")
    fill = alt.Color(
        "what:N", scale=alt.Scale(domain=kinds, range=[CELL_COLOURS[w] for w in kinds]), title=None, legend=legend
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


def draw_cells(block: Block, cut: SurgeryRecord, *, before: bool) -> Iterator[dict[str, Any]]:
    """Yield a rectangle for every head of every layer; for large models one for every layer and kind."""
    whole = sum(block.heads) > CELLS
    old = list_heads(cut.plan.before)
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


OF_SECTION: dict[str, tuple[Callable[[Section], list[Chart]], ...]] = {
    "Results": (by_heads, metric_by_cost),
    "Training curves": (by_epoch,),
    "What was cut, and why": (of_cuts,),
    "Conditioning": (kappa_by_layer,),
    "Head importance": (of_heads,),
}


KINDS = {"self": "self-attention", "encoder": "encoder", "decoder": "decoder", "cross": "cross-attention"}
ORDERS = {
    "importance": "least important first",
    "reverse": "most important first",
}


def head_charts(study: HeadStudy, name: str = "", key: str = "") -> list[Chart]:
    """Draw an importance map for every kind of attention (encoder, decoder, cross), layers from top to bottom, and the
    score as heads are switched off, one line for every order. `name` begins the titles and `key` the file names.
    """
    begin = f"{name}: " if name else ""
    kinds = {}
    for attention in study.attentions:
        if attention.importance:
            kinds.setdefault(attention.kind, []).append(attention)
    several = len({a.stage for a in study.attentions}) > 1
    says = "Mean slope of the loss by each head's gate, absolute per sample (Michel et al. 2019); fuller is larger."
    says += f" {study.samples['importance']:,} samples." if "importance" in study.samples else ""
    charts = []
    for kind, layers in kinds.items():
        staged = several and kind == "self"  # from 1, after the stage if a model has several
        rows = [(f"{a.stage + 1}.{a.layer + 1}" if staged else str(a.layer + 1), a.importance) for a in layers]
        own = f"heads-{kind}" if len(kinds) > 1 else "heads-importance"
        charts.append(Chart(f"{key}{own}", f"{begin}{KINDS.get(kind, kind)}", says, cells(rows, "head", "layer")))
    series = []
    for i, (order, said) in enumerate(ORDERS.items()):
        points = [(point.fraction, getattr(point, study.score)) for point in study.curve.orders.get(order, ())]
        series.append(Series(said, tuple(Point(*at) for at in points if None not in at), i))
    x, y = Axis("share of heads off", PERCENT), Axis(study.score, PERCENT if study.score == "accuracy" else PLAIN)
    says = "On held-out samples, without retraining."
    return charts + draw_lines(f"{key}heads-pruning", f"{begin}heads switched off", says, series, x, y)


LEAST = 3  # numbers of heads that make a curve


def sweep(section: Section) -> dict[str, list[tuple[int, Row]]]:
    """Return the curves of a section by name, deepest first, with (heads, row) of every arm; none if no depth has
    `LEAST` numbers of heads.

    Along a curve either head_dim or the inner width (heads times head_dim) is constant; an arm may be on one of each.
    Arms that began with trained weights, the original among them, form their own curves. Excluded are controls, which
    follow the size of their arm, models whose stages differ in heads, and single runs, which may differ in anything.
    """
    if section.kind != "experiment":
        return {}
    curves: dict[tuple[int, int, bool, tuple[str, int]], list[tuple[int, Row]]] = {}
    for row in section.rows:
        shape = {key: int(value) for key, value in (row.shape or {}).items() if value.isdecimal()}
        if row.role != "control" and {"depth", "heads", "head_dim", "mlp_dim"} <= shape.keys():
            for same in (("head_dim", shape["head_dim"]), ("inner width", shape["heads"] * shape["head_dim"])):
                key = (shape["depth"], shape["mlp_dim"], row.began_trained, same)
                curves.setdefault(key, []).append((shape["heads"], row))
    curves = {key: arms for key, arms in curves.items() if len({heads for heads, _ in arms}) >= LEAST}
    several, both, apart = (len({key[i] for key in curves}) > 1 for i in (1, 2, 3))
    made = {}
    for (depth, mlp, trained, same), arms in sorted(curves.items(), key=lambda item: (-item[0][0], *item[0][1:])):
        name = plural(depth, "layer") + (f", MLP {mlp:,}" if several else "")
        name += f", {same[0]} {same[1]:,}" if apart else ""
        name += (", cut from trained weights" if trained else ", from scratch") if both else ""
        made[name] = sorted(arms, key=lambda arm: arm[0])
    return made
