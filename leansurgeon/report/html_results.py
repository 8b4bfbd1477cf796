"""Parts of a section that show figures: results, starting points, curves, conditioning, memory and speed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from leansurgeon.report import by_heads, folder, humans, predicted, svg
from leansurgeon.report.collect import Entry
from leansurgeon.report.columns import (
    Column,
    columns,
    invariant_columns,
    layer_columns,
    layer_rows,
    layers_heads_column,
    without_gaps,
)
from leansurgeon.report.conditioning import Bound
from leansurgeon.report.html import Child, Markup, data, join, table, tag
from leansurgeon.report.humans import NONE, part, text
from leansurgeon.report.rows import PARTS, Row, Section
from leansurgeon.report.table import SHARED, one_line

Entries = dict[str, Entry]  # by the path that stands in a row

RESULTS = ("name", "seeds", "layers_heads", "before", "metric", "test", "loss", "parameters", "change")
RESULTS += ("kappa_median", "kappa_worst", "kappa_output", "kappa_jacobian")
COST = ("name", "memory", "step_ms", "throughput", "seconds")
STARTS = {
    "transfer": "ours: cut from trained weights",
    "fresh": "fresh: the paper's way",
    "fresh-attention": "fresh attention, the rest kept",
}


def entries_of(row: Row, entries: Entries) -> list[Entry]:
    return [entries[path] for path in row.paths if path in entries]


def style_of(section: Section) -> dict[str, int]:
    """One look for every row of a section, the same in all of its charts."""
    return {row.name: i for i, row in enumerate(section.rows)}


def grid(
    caption: str, rows: Sequence[Any], found: Sequence[Column], *, cards: bool = True, hidden: bool = False
) -> Markup:
    """A table of columns; where a column has a number behind its text, the page carries it too."""
    found = without_gaps(found, rows)
    cells = [
        [column.cell(row) if i == 0 else data(column.cell(row), column.raw(row)) for i, column in enumerate(found)]
        for row in rows
    ]
    return table(caption, [one_line(column.head) for column in found], cells, cards=cards, caption_hidden=hidden)


def chosen(section: Section, keys: Iterable[str]) -> list[Column]:
    known = {c.key: c for c in [*columns(section, wide=True), layers_heads_column()]}
    return [known[key] for key in keys if key in known]


# -- results --------------------------------------------------------------------------------------


def results(section: Section) -> Markup:
    if section.kind == "glue":
        return grid("Results", section.rows, columns(section), hidden=True)
    shape = ("depth", "heads", "head_dim", "mlp_dim")
    keys = ("name", *shape, "parameters", "change") if section.kind == "models" else RESULTS
    shown = grid("Results", section.rows, chosen(section, keys), hidden=True)
    return join(
        shown, tag("div", *heads_charts(section), accuracy_chart(section), parts_chart(section), class_="charts")
    )


def accuracy_chart(section: Section) -> Markup | None:
    task, styles = section.task, style_of(section)
    known = [row for row in section.rows if row.metric and row.parameters]
    if task is None or len(known) < 2:
        return None
    found = [
        svg.Series(row.name, ((row.parameters, row.metric.mean),), styles[row.name], (row.metric.sd or 0.0,))
        for row in known
    ]
    spread = "The bar is one standard deviation over seeds to each side." if any(r.metric.sd for r in known) else ""
    beside = "Points of nearly equal size stand side by side."
    return svg.chart(
        found,
        f"{task.label} against parameters",
        f"{spread or 'One seed each.'} {beside}",
        x_label="parameters",
        y_label=task.label,
        x_format=short_count,
        y_format=metric_format(section),
        lines=False,
    )


def heads_charts(section: Section) -> list[Markup | None]:
    """Metric and kappa against heads, one line for every curve of `by_heads`: the paper's figures 3 and 5."""
    found, task = by_heads.sweep(section), section.task
    if task is None or not found:
        return []
    metric, kappa = [], []
    for i, curve in enumerate(found):
        known = [(heads, row.metric) for heads, row in curve.arms if row.metric]
        points = tuple((heads, spread.mean) for heads, spread in known)
        metric.append(svg.Series(curve.name, points, i, tuple(spread.sd or 0.0 for _, spread in known)))
        known = [(heads, row.kappa.median) for heads, row in curve.arms if row.kappa and row.kappa.median]
        points = tuple((heads, bound.value) for heads, bound in known)
        kappa.append(svg.Series(curve.name, points, i, hollow=tuple(not bound.exact for _, bound in known)))
    says = "The bar is one standard deviation over seeds to each side." if any(any(s.errors) for s in metric) else ""
    bounded = " Hollow: at least so much." if any(any(s.hollow) for s in kappa) else ""
    return [
        svg.chart(
            metric,
            f"{task.label} against heads",
            f"{says or 'One seed each.'} Controls are left out.",
            x_label="heads",
            y_label=task.label,
            x_format=lambda v: f"{v:g}",
            y_format=metric_format(section),
            whole_x=True,
        ),
        svg.chart(
            kappa,
            "Kappa against heads",
            f"Median over layers, so compare along a curve and not between depths: kappa grows with depth.{bounded}",
            x_label="heads",
            y_label="kappa",
            x_format=lambda v: f"{v:g}",
            log=True,
            whole_x=True,
        ),
    ]


def parts_chart(section: Section) -> Markup | None:
    known = [(row.name, [row.parts.get(key) or 0 for key in PARTS]) for row in section.rows if row.parts]
    names = [{"mlp": "MLP"}.get(key, key) for key in PARTS]
    return svg.bars(known, names, "Parameters by part", "The sum stands at the right.", lambda v: f"{v:,.0f}")


def metric_format(section: Section) -> Callable[[float], str]:
    return (lambda v: f"{round(100 * v, 2):g} %") if section.task and section.task.percent else svg.plain_small


def short_count(value: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g}"


# -- starting points ------------------------------------------------------------------------------


def start_of(row: Row, entries: Entries) -> str:
    """What the weights of a row start from, as `surgery.json` or the experiment says."""
    first = next(iter(entries_of(row, entries)), None)
    said = text(part(first.data, "model", "surgery", "initialised")) if first else ""
    return row.init or said


def starts(section: Section, entries: Entries) -> Markup | None:
    """Every arm by what it starts from, before and after training."""
    rows = [row for row in section.rows if row.before and row.metric]
    if section.task is None or not rows:
        return None

    def name(row: Row) -> str:
        if row.role == "original":
            return "the original"
        return STARTS.get(start_of(row, entries), NONE)

    def epochs(row: Row) -> str:
        if row.epochs is None:
            return NONE
        before = f"{row.inherited:.3g} + " if row.inherited else ""
        return f"{before}{row.epochs:.3g}"

    known = {c.key: c for c in chosen(section, ("name", "layers_heads", "before", "metric"))}
    heads = {"before": "before training", "metric": "after training"}
    found = [
        known["name"],
        Column("start", "start", name, name),
        known["layers_heads"],
        *(Column(key, heads[key], known[key].cell, known[key].raw) for key in heads),
        Column("epochs", "epochs", epochs, epochs),
    ]
    return grid(f"{section.task.label} by starting point", rows, found, hidden=True)


# -- curves ---------------------------------------------------------------------------------------


def curves(section: Section, entries: Entries) -> Markup | None:
    """Metric and loss over the epochs, one line for every seed."""
    styles, task = style_of(section), section.task
    known = [
        (row, found) for row in section.rows for e in entries_of(row, entries) if (found := folder.curve(e)) is not None
    ]
    if task is None or not known:
        return None

    def lines(key: str) -> list[svg.Series]:
        return [svg.Series(row.name, getattr(found, key), styles[row.name]) for row, found in known]

    every = "One line for every seed." if len(known) > len({row.name for row, _ in known}) else ""
    shown, edge = svg.cropped(lines("metric"), task.higher_is_better)
    side = "below" if task.higher_is_better else "above"
    show = metric_format(section)
    cut = f" What is {side} {show(edge)} is not drawn." if edge is not None else ""
    metric = svg.chart(
        shown,
        f"{task.label} during training",
        f"On the evaluation samples. {every}{cut}",
        x_label="epoch",
        y_label=task.label,
        x_format=svg.plain_small,
        y_format=show,
        marks=False,
    )
    loss = svg.chart(
        lines("loss"),
        "Training loss",
        f"Mean since the last time it was logged; arms may scale it differently (smoothing, distillation). {every}",
        x_label="epoch",
        y_label="loss",
        x_format=svg.plain_small,
        y_format=svg.plain_small,
        marks=False,
        log=True,
    )
    return tag("div", metric, loss, class_="charts")


# -- conditioning ---------------------------------------------------------------------------------

KAPPA_CHARTS = (
    ("median", "Kappa of each layer", "Raw: of what enters the output projection, median over samples"),
    ("centred", "Kappa with the mean token subtracted", "Median over samples"),
    ("output", "Kappa of A W_o", "No change of basis of the heads moves it"),
    ("jacobian", "Kappa of the block's Jacobian", "No change of basis of the heads moves it"),
)


def conditioning(section: Section) -> Markup | None:
    """Kappa layer by layer: charts, and the table with rank and every other measure."""
    rows = layer_rows(section)
    if not rows:
        return None
    charts = [kappa_chart(section, key, title, says) for key, title, says in KAPPA_CHARTS]
    raw = grid("Kappa of what enters the output projection", rows, layer_columns(section), cards=False)
    extra = without_gaps(invariant_columns(section), rows)
    extra = [replace(c, head=c.head.replace("Jaco-\nbian", "Jacobian")) for c in extra]  # there is room for it here
    says = "Kappa that depends on the basis of the heads (A, W_q to W_o) beside what does not (the rest)"
    invariant = grid(says, rows, extra, cards=False) if len(extra) > len(SHARED) else None
    return join(tag("div", charts, class_="charts"), raw, invariant)


def kappa_chart(section: Section, key: str, title: str, says: str) -> Markup | None:
    styles = style_of(section)
    found = []
    for row in section.rows:
        layers = [(x.layer, getattr(x, key)) for x in row.kappa.layers] if row.kappa else []
        known = [(layer, bound) for layer, bound in layers if isinstance(bound, Bound)]
        points = tuple((float(layer), bound.value) for layer, bound in known)
        hollow = tuple(not bound.exact for _, bound in known)
        found.append(svg.Series(row.name, points, styles[row.name], hollow=hollow))
    bounded = any(any(s.hollow) for s in found)
    return svg.chart(
        found,
        title,
        says + ("; hollow: at least so much." if bounded else "."),
        x_label="layer",
        y_label="kappa",
        x_format=lambda v: f"{v:g}",
        log=True,
        whole_x=True,
    )


# -- cost -----------------------------------------------------------------------------------------


def cost(section: Section, entries: Entries) -> Markup | None:
    """Memory and speed as the trainings saw them; the prediction beside the measurement where there is one."""
    rows = [row for row in section.rows if row.memory or row.step_ms]
    if not rows:
        return None

    def of(row: Row) -> dict[str, int]:
        first = next(iter(entries_of(row, entries)), None)
        return (predicted.memory(first) if first else None) or {}

    guesses = {row.name: of(row) for row in rows}

    def total(row: Row) -> int | None:
        return guesses[row.name].get("total")

    found = chosen(section, COST)
    after = 1 + next(i for i, c in enumerate(found) if c.key == "memory")
    found.insert(after, Column("predicted", "predicted", lambda r: humans.memory(total(r)), total))
    parts = [(name, [guess[key] for key in predicted.PARTS]) for name, guess in guesses.items() if guess]
    says = "What lives at the moment of the peak, by a rehearsal without a GPU."
    split = svg.bars(parts, predicted.PARTS, "Predicted peak memory", says, humans.memory)
    return join(grid("Memory and speed of training", rows, found, hidden=True), split)


def facts(pairs: Iterable[tuple[str, Child]]) -> Markup:
    """Names and what is said of each; those without anything vanish."""
    return tag("dl", [join(tag("dt", name), tag("dd", said)) for name, said in pairs if said])
