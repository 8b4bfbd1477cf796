"""The columns of the tables: what each is called, how a person reads its cell, and what a program gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

from leansurgeon.report import humans
from leansurgeon.report.evidence.kappa import MATRICES, Bound, LayerKappa
from leansurgeon.report.evidence.run import PARTS, SHAPE
from leansurgeon.report.humans import NONE, Spread
from leansurgeon.report.rows import glue
from leansurgeon.report.rows.rows import Row, Section

SHARED = ("name", "layer", "kappa_median")  # the first columns of the second table of `--kappa`


def same(value: Any) -> Any:
    """The value as it is."""
    return value


@dataclass(frozen=True)
class Column:
    """`head` breaks at a newline where a table may; `value` is what the column takes from a row, `show` the text of
    it for people, `plain` what CSV and programs get of it.
    """

    key: str
    head: str
    value: Callable[[Any], Any]
    show: Callable[[Any], str] = str
    plain: Callable[[Any], Any] = same
    left: bool = False

    def cell(self, row: Any) -> str:
        """The row's cell as a person reads it."""
        return self.show(self.value(row))

    def raw(self, row: Any) -> Any:
        """The row's value for a program."""
        return self.plain(self.value(row))


def spread_cell(value: Spread | None, decimals: int, percent: bool) -> str:
    """`98.4 ± 0.4 %`, `23.41 ± 0.12`, `98.4 %` for one seed."""
    if value is None:
        return NONE
    scale, unit = (100.0, " %") if percent else (1.0, "")
    sd = "" if value.sd is None else f" ± {scale * value.sd:.{decimals}f}"
    return f"{scale * value.mean:,.{decimals}f}{sd}{unit}"


def bound_cell(value: Bound | None) -> str:
    """`42.5`, or `≥3.1e7` where only a bound is known."""
    if value is None:
        return NONE
    shown = f"{value.value:.0f}" if 9.995 <= value.value < 999.5 else humans.plain(value.value)
    return shown if value.exact else f"≥{shown}"


def rank_cell(rank: float | None, k: float | None) -> str:
    """A numerical rank out of the possible `k`, as `31/64`."""
    return NONE if rank is None or k is None else f"{rank:.0f}/{k:.0f}"


def mean(value: Spread | None) -> float | None:
    """The mean of a spread, None without one."""
    return value.mean if value else None


def exact(value: Bound | None) -> float | None:
    """A bound's value if it is exact; a lower bound gives None."""
    return value.value if value and value.exact else None


def name_column(section: Section) -> Column:
    """The column of names, headed by what the section's rows are."""
    head = {"experiment": "arm", "runs": "run", "models": "model"}[section.kind]
    return Column("name", head, attrgetter("name"), left=True)


def metric_columns(section: Section) -> list[Column]:
    """The columns of the task's metric, with as many decimals as its samples support; none without a task."""
    task = section.task
    if task is None:
        return []
    largest = max((row.metric.mean for row in section.rows if row.metric), default=1.0)
    decimals = task.decimals if task.percent else 2 if largest >= 1 else 4  # perplexities; errors below 1
    show = partial(spread_cell, decimals=decimals, percent=task.percent)
    heads = {
        "metric": task.label,
        "macro_f1": "macro\nF1",
        "best": "best",
        "before": "before\ntraining",
        "test": "test",
        "test_last": "test\n(last)",
    }
    return [Column(key, head, attrgetter(key), show, mean) for key, head in heads.items()]


def glue_columns() -> list[Column]:
    """The eight tasks of GLUE and their mean, or how many of them are there."""

    def cell(score: Spread | None) -> str:
        """A score in per cent, without its spread."""
        return NONE if score is None else f"{100 * score.mean:.1f}"  # spreads would not fit beside nine numbers

    def average(row: Row) -> str:
        """The mean of all nine scores, or how many of them there are so far."""
        average_score = glue.mean_of(row)
        return cell(average_score) if average_score else f"{len(row.scores or {})} of {len(glue.NAMES)}"

    name = Column("name", "model", attrgetter("name"), left=True)
    tasks = [
        Column(key, shown, lambda r, key=key: (r.scores or {}).get(key), cell, mean)
        for key, shown in glue.NAMES.items()
    ]
    return [name, *tasks, Column("mean", "mean", same, average, lambda r: mean(glue.mean_of(r)))]


def memory_column(section: Section) -> Column:
    """Named after what was measured; where a table mixes both kinds, every cell says its own."""
    kinds = {row.on_gpu for row in section.rows if row.memory}
    head = "peak\nmemory" if len(kinds) > 1 else "GPU\npeak" if kinds == {True} else "peak RSS\n(CPU)"

    def cell(row: Row) -> str:
        """Peak memory, with the device where rows of both kinds stand together."""
        shown = humans.memory(mean(row.memory))
        return f"{shown} {'GPU' if row.on_gpu else 'CPU'}" if row.memory and len(kinds) > 1 else shown

    return Column("memory", head, same, cell, lambda r: mean(r.memory))


def kappa_column(key: str, head: str, pick: Callable[[Any], Bound | None]) -> Column:
    """A column of one figure of the condition numbers; `pick` takes it from the row's `Kappa`."""
    return Column(key, head, lambda r: pick(r.kappa) if r.kappa else None, bound_cell, exact)


def mean_column(key: str, head: str, show: Callable[[float | None], str]) -> Column:
    """A column of a figure of the row, by the name of its field, without its deviation."""
    return Column(key, head, attrgetter(key), lambda value: show(mean(value)), mean)


def columns(section: Section, *, wide: bool = False, short: bool = False) -> list[Column]:
    """The columns of a section: those of the default table, or all of them."""
    if section.kind == "glue":
        return glue_columns()
    metric = metric_columns(section)
    parameters = [
        Column("parameters", "params", attrgetter("parameters"), partial(humans.count, short=short)),
        Column(
            "change",
            "change",
            same,
            lambda r: NONE if r.role == "original" else humans.change(r.parameters, r.reference_parameters),
            attrgetter("change"),
        ),
    ]
    cost = [memory_column(section), mean_column("step_ms", "ms/\nstep", humans.plain)]
    median = kappa_column("kappa_median", "kappa\nmedian", lambda k: k.median)
    worst = kappa_column("kappa_worst", "kappa\nworst", lambda k: k.worst)
    if not wide:
        shape = shape_columns() if section.kind == "models" else [layers_heads_column()]
        metric = [column for column in metric if column.key in ("metric", "macro_f1", "test")]
        return [name_column(section), *shape, *metric, *parameters, *cost, median, worst]
    unit = next((r.throughput_unit for r in section.rows if r.throughput_unit), "throughput")
    return [
        name_column(section),
        Column("seeds", "seeds", lambda r: len(r.seeds), lambda seeds: str(seeds or NONE)),
        *metric,
        Column("loss", "loss", attrgetter("loss"), partial(spread_cell, decimals=4, percent=False), mean),
        *parameters,
        *[Column(f"parameters_{k}", k, lambda r, k=k: (r.parts or {}).get(k), humans.count) for k in PARTS],
        *shape_columns(),
        *cost,
        mean_column("throughput", unit, lambda v: humans.count(v) if (v or 0) >= 100 else humans.plain(v)),
        mean_column("seconds", "time", humans.seconds),
        kappa_column("kappa_mean", "kappa\nmean", lambda k: k.mean),
        median,
        worst,
        *rank_columns(),
        kappa_column("kappa_output", "kappa\nA W_o", lambda k: k.output),
        kappa_column("kappa_jacobian", "kappa\nJacobian", lambda k: k.jacobian),
    ]


def rank_columns() -> list[Column]:
    """What must stand beside kappa where there is room: rank, centred value, samples that lack rank."""

    def rank(row: Row) -> str:
        """The numerical rank of the row's poorest layer."""
        poorest = row.kappa.poorest if row.kappa else None
        return rank_cell(poorest.rank, poorest.k) if poorest else NONE

    return [
        Column("rank", "rank", rank),
        kappa_column("kappa_centred", "kappa\ncentred", lambda k: k.centred),
        Column("deficient", "rank-\ndeficient", lambda r: r.kappa.deficient if r.kappa else None, humans.count),
    ]


def shape_columns() -> list[Column]:
    """Columns of layers, heads, head_dim and MLP."""
    heads = {"depth": "layers", "heads": "heads", "head_dim": "head\ndim", "mlp_dim": "MLP"}
    return [Column(key, heads[key], lambda r, key=key: (r.shape or {}).get(key, NONE)) for key in SHAPE]


def layers_heads_column() -> Column:
    """Layers and heads in one narrow column, as `6x12`."""
    return Column("layers_heads", "L x\nheads", lambda r: f"{r.shape['depth']}x{r.shape['heads']}" if r.shape else NONE)


def one_line(head: str) -> str:
    """A column's head without its line breaks."""
    return head.replace("-\n", "-").replace("/\n", "/").replace("\n", " ")


def chosen(section: Section, wide: bool, kappa: bool) -> tuple[Sequence[Any], list[Column]]:
    """The rows of a table (layers with `kappa`) and those of its columns that say something."""
    if kappa:
        rows, extra = layer_rows(section), invariant_columns(section)[len(SHARED) :] if wide else []
        return rows, without_gaps([*layer_columns(section), *extra], rows)
    return section.rows, without_gaps(columns(section, wide=wide), section.rows)


# -- one row per layer ------------------------------------------------------------------------------

LayerRow = tuple[Row, LayerKappa]


def layer_columns(section: Section) -> list[Column]:
    """The columns of `report --kappa`."""

    def bound(key: str, head: str) -> Column:
        """A column of one of a layer's condition numbers, by the name of its field."""
        return Column(f"kappa_{key}", head, lambda r: getattr(r[1], key), bound_cell, exact)

    def figure(key: str, head: str) -> Column:
        """A column of a plain figure of a layer."""
        return Column(key, head, lambda r: getattr(r[1], key), humans.plain)

    return [
        Column("name", name_column(section).head, lambda r: r[0].name, left=True),
        Column("layer", "layer", lambda r: r[1].layer),
        bound("mean", "kappa\nmean"),
        bound("median", "kappa\nmedian"),
        bound("worst", "kappa\nworst"),
        bound("centred", "kappa\ncentred"),
        Column("rank", "rank", lambda r: rank_cell(r[1].rank, r[1].k)),
        figure("stable_rank", "stable\nrank"),
        figure("effective_rank", "eff.\nrank"),
        figure("aspect", "h*d/N"),
    ]


def invariant_columns(section: Section) -> list[Column]:
    """The columns of the second table of `report --kappa`: what a change of basis moves, and what it does not."""
    name, layer, _, median, *_ = layer_columns(section)

    def bound(key: str, head: str, pick: Callable[[LayerKappa], Bound | None]) -> Column:
        """A column of a bound that `pick` takes from the layer."""
        return Column(key, head, lambda r: pick(r[1]), bound_cell, exact)

    def weight(key: str) -> Callable[[LayerKappa], Bound | None]:
        """A function that takes the bound of one weight matrix from a layer."""
        return lambda layer: (layer.weights or {}).get(key)

    return [
        name,
        layer,
        replace(median, head="A"),
        *[bound(f"kappa_w_{key}", f"W_{key}", weight(key)) for key in MATRICES],
        bound("kappa_output", "A W_o", lambda layer: layer.output),
        bound("kappa_jacobian", "Jaco-\nbian", lambda layer: layer.jacobian),
        bound("kappa_vo", "W_o W_v", weight("vo")),
        bound("kappa_qk", "W_q' W_k", weight("qk")),
    ]


def layer_rows(section: Section) -> list[LayerRow]:
    """Every layer of every row that has condition numbers."""
    return [(row, layer) for row in section.rows if row.kappa for layer in row.kappa.layers]


def without_gaps(columns: Sequence[Column], rows: Sequence[Any]) -> list[Column]:
    """The columns that say something in at least one row; the name always stays."""
    return [c for c in columns if c.key == "name" or any(c.cell(row) != NONE for row in rows)]
