"""The charts of a section: which numbers of its rows to draw, and the text under their titles; also the charts of
`leansurgeon heads`.

A row has the same look in all of them. A new chart is a function here, listed in `OF_SECTION`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import altair as alt

from leansurgeon.errors import plural
from leansurgeon.report.charts.anatomy import of_cuts
from leansurgeon.report.charts.forms import COUNT, PERCENT, PLAIN, WHOLE, Axis, Chart, Point, Series, cells, lines
from leansurgeon.report.humans import Spread
from leansurgeon.report.kappa import Bound
from leansurgeon.report.rows import Row, Section
from leansurgeon.report.runs import AttentionHeads, Curve, HeadStudy, Points

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


def one(key: str, title: str, says: str, drawing: alt.LayerChart | None) -> list[Chart]:
    """Return the chart in a list; an empty list if there was nothing to draw."""
    return [Chart(key, title, says, drawing)] if drawing is not None else []


# -- results --------------------------------------------------------------------------------------


def metric_by_heads(section: Section) -> list[Chart]:
    """Draw the paper's figure 3: the metric against heads, one line for every depth."""
    if section.task is None:
        return []
    series = [
        Series(name, tuple(with_error(heads, row.metric) for heads, row in arms if row.metric), i)
        for i, (name, arms) in enumerate(sweep(section).items())
    ]
    spread = any(p.low != p.high for s in series for p in s.points)
    says = f"{ONE_DEVIATION if spread else 'One seed each.'} Controls are left out."
    drawing = lines(series, Axis("heads", WHOLE), metric_axis(section))
    return one("heads", f"{section.task.label} against heads", says, drawing)


def kappa_by_heads(section: Section) -> list[Chart]:
    """Draw the paper's figure 5: kappa against heads."""
    series = [
        Series(name, list_bounded_points((heads, row.kappa and row.kappa.median) for heads, row in arms), i)
        for i, (name, arms) in enumerate(sweep(section).items())
    ]
    bounded = " Hollow: at least so much." if any(p.bound for s in series for p in s.points) else ""
    says = f"Median over layers, so compare along a curve and not between depths: kappa grows with depth.{bounded}"
    drawing = lines(series, Axis("heads", WHOLE), Axis("kappa", log=True))
    return one("heads-kappa", "Kappa against heads", says, drawing)


def metric_by_parameters(section: Section) -> list[Chart]:
    """Draw the task's metric against the number of parameters."""
    return metric_against(section, "parameters", Axis("parameters", COUNT), lambda row: row.parameters)


def metric_by_latency(section: Section) -> list[Chart]:
    """Draw the task's metric against the latency of one sample, if the timed rows took turns."""
    if len({row.measured for row in section.rows if row.latency}) != 1:
        return []
    return metric_against(
        section, "latency", Axis("ms for one sample"), lambda row: row.latency and 1000 * row.latency.median
    )


def metric_against(section: Section, key: str, axis: Axis, of: Callable[[Row], float | None]) -> list[Chart]:
    """Draw the metric against a quantity, one point for each row that has both; a line marks the original's metric."""
    known = [(x, row) for row in section.rows if row.metric and (x := of(row))]
    if section.task is None or len(known) < 2:
        return []
    look = styles(section)
    series = [Series(row.name, (with_error(x, row.metric),), look[row.name], joined=False) for x, row in known]
    if section.original and section.original.metric:
        ends, level = (min(x for x, _ in known), max(x for x, _ in known)), section.original.metric.mean
        points = tuple(Point(x, level) for x in ends)
        series.append(Series(section.original.name, points, look[section.original.name], marks=False))
    spread = any(row.metric.sd for _, row in known)
    says = f"{ONE_DEVIATION if spread else 'One seed each.'} The line is the level of the original."
    drawing = lines(series, axis, metric_axis(section))
    return one(key, f"{section.task.label} against {axis.title}", says, drawing)


# -- training -------------------------------------------------------------------------------------


def by_epoch(section: Section, pick: Callable[[Curve], Points], axis: Axis, chart: tuple[str, str, str]) -> list[Chart]:
    """Draw a line for every seed whose folder has its curve; `chart` is key, title and text."""
    look, (key, title, says) = styles(section), chart
    series = [
        Series(row.name, tuple(Point(x, y) for x, y in pick(run.curve)), look[row.name], marks=False)
        for row in section.rows
        for run in row.runs
        if run.curve is not None and pick(run.curve)
    ]
    says += " One line for every seed." if len(series) > len({s.name for s in series}) else ""
    return one(key, title, says, lines(series, Axis("epoch"), axis))


def metric_by_epoch(section: Section) -> list[Chart]:
    """Draw the metric on the evaluation samples against epochs, one line for every curve."""
    if section.task is None:
        return []
    chart = "metric", f"{section.task.label} during training", "On the evaluation samples."
    return by_epoch(section, lambda curve: curve.metric, metric_axis(section), chart)


def loss_by_epoch(section: Section) -> list[Chart]:
    """Draw the training loss (logarithmic axis) against epochs, one line for every curve."""
    says = "Mean since the last time it was logged; arms may scale it differently (smoothing, distillation)."
    axis = Axis("training loss", log=True)
    return by_epoch(section, lambda curve: curve.loss, axis, ("loss", "Training loss", says))


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
        drawing = lines(series, Axis("layer", WHOLE), Axis("kappa", log=True))
        charts += one(f"kappa-{key}", title, says, drawing)
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


OF_SECTION: dict[str, tuple[Callable[[Section], list[Chart]], ...]] = {
    "Results": (metric_by_heads, kappa_by_heads, metric_by_parameters, metric_by_latency),
    "Training curves": (metric_by_epoch, loss_by_epoch),
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
    kinds: dict[str, list[AttentionHeads]] = {}
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
    labels = PERCENT if study.score == "accuracy" else PLAIN
    drawing = lines(series, Axis("share of heads off", PERCENT), Axis(study.score, labels))
    says = "On held-out samples, without retraining."
    return [*charts, *one(f"{key}heads-pruning", f"{begin}heads switched off", says, drawing)]


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
