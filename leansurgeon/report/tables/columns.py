"""The columns of the tables, each defined once: its head, the value it takes from a row, and its format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from leansurgeon.report import humans
from leansurgeon.report.humans import NONE, Spread
from leansurgeon.report.kappa import MATRICES, Bound, LayerKappa
from leansurgeon.report.rows import GLUE, Row, Section, follow
from leansurgeon.report.runs import PARTS, SHAPE, Seconds

NARROW = ("name", "layers_heads", "metric", "macro_f1", "test", "parameters", "change", "memory", "step_ms")
NARROW += ("kappa_median", "kappa_worst")
MODELS = ("name", *SHAPE, *NARROW[5:])
# With inference costs, instead of training costs.
ANSWERING = (*NARROW[:7], "size", "inference_memory", "latency", "kappa_median")
RANKS = ("rank", "kappa_centred", "deficient")  # shown beside kappa if there is room
LAYERS = ("name", "layer", "kappa_mean", "kappa_median", "kappa_worst", "kappa_centred", "rank", "stable_rank")
LAYERS += ("effective_rank", "aspect")
# First what a change of basis of the heads alters, then what it does not; in `INVARIANTS`, after its first three
# columns.
WEIGHTS = (*(f"kappa_w_{key}" for key in MATRICES), "kappa_output", "kappa_jacobian", "kappa_vo", "kappa_qk")
INVARIANTS = ("name", "layer", "kappa_input", *WEIGHTS)


class LayerRow(NamedTuple):
    """One layer of a row with known kappa."""

    row: Row | None
    layer: LayerKappa
    name: str = ""  # of a layer without a row: `3`, `cross 3`
    interval: Sequence[float | None] = ()  # confidence interval of the median


TableRow: TypeAlias = Row | LayerRow
Figure: TypeAlias = Spread | Bound | str | float | None


def show(value: Figure) -> str:
    """Return `42.5`, or `≥3.1e7` for a lower bound; everything else as it is."""
    if not isinstance(value, Bound):
        return NONE if value is None else str(value)
    shown = f"{value.value:.0f}" if 9.995 <= value.value < 999.5 else humans.plain(value.value)
    return shown if value.exact else f"≥{shown}"


def plain(value: Figure) -> Any:
    """Return the value for CSV and programs: the mean of a spread, an exact value (None for a lower bound)."""
    if isinstance(value, Spread):
        return value.mean
    return (value.value if value.exact else None) if isinstance(value, Bound) else value


@dataclass(frozen=True)
class Column:
    """A column. `head` breaks at newlines in some tables. `take` is the value's path, such as `kappa.median`, or a
    function of the row. `show` formats it for people, `plain` for programs.
    """

    key: str
    head: str
    take: str | Callable[[Any], Any]
    show: Callable[[Any], str] = show
    plain: Callable[[Any], Any] = plain
    left: bool = False

    def value(self, row: TableRow) -> Any:
        """Return the row's value; None if any step of the path is missing."""
        return self.take(row) if callable(self.take) else follow(row, self.take)

    def cell(self, row: TableRow) -> str:
        """Return the row's cell as text."""
        return self.show(self.value(row))

    def raw(self, row: TableRow) -> Any:
        """Return the row's value for a program."""
        return self.plain(self.value(row))

    @property
    def title(self) -> str:
        """The head on one line."""
        return self.head.replace("Jaco-\n", "Jaco").replace("-\n", "-").replace("/\n", "/").replace("\n", " ")


def show_spread(value: Spread | None, decimals: int, percent: bool) -> str:
    """Return `98.4 ± 0.4 %`, `23.41 ± 0.12`, `98.4 %` for one seed."""
    if value is None:
        return NONE
    scale, unit = (100.0, " %") if percent else (1.0, "")
    sd = "" if value.sd is None else f" ± {scale * value.sd:.{decimals}f}"
    return f"{scale * value.mean:,.{decimals}f}{sd}{unit}"


def median(value: Seconds | None) -> float | None:
    """Return the median time."""
    return value and value.median


def show_seconds(value: Seconds | None) -> str:
    """Return `4.1 ms`, `1.3 s`."""
    if value is None:
        return NONE
    return f"{humans.plain(value.median)} s" if value.median >= 1 else f"{humans.plain(1000 * value.median)} ms"


def show_rank(part: LayerKappa | None) -> str:
    """Return a numerical rank out of the possible one, as `31/64`."""
    return NONE if part is None or part.rank is None else f"{part.rank:.0f}/{part.k:.0f}"


def of_mean(show: Callable[[float | None], str]) -> Callable[[Spread | None], str]:
    """Return a function that formats a spread by its mean."""
    return lambda value: show(plain(value))


def by_key(columns: Iterable[Column]) -> dict[str, Column]:
    """Return columns by key."""
    return {column.key: column for column in columns}


def define_columns(section: Section, *, short: bool = False) -> dict[str, Column]:
    """Return every column that a section may show, in the order of the wide table; `short` gives parameters in
    millions.
    """
    task, shown = section.task, None
    if task:
        largest = max((row.metric.mean for row in section.rows if row.metric), default=1.0)
        decimals = task.decimals if task.percent else 2 if largest > 1 else 4  # perplexities; errors below 1
        shown = partial(show_spread, decimals=decimals, percent=task.percent)
    head = {"experiment": "arm", "runs": "run", "models": "model", "glue": "model", "comparison": "model"}[section.kind]
    unit = next((r.throughput_unit for r in section.rows if r.throughput_unit), "throughput")
    heads = {"macro_f1": "macro\nF1", "best": "best", "before": "before\ntraining", "test": "test"}
    heads |= {"test_last": "test\n(last)"}
    kinds = {row.on_gpu for row in section.rows if row.memory}
    # Names what was measured; if a table mixes both kinds, each cell says which.
    memory_head = "peak\nmemory" if len(kinds) > 1 else "GPU\npeak" if kinds == {True} else "peak RSS\n(CPU)"

    def show_change(row: Row) -> str:
        """Return the change against the original or the source; a dash for the original itself."""
        return NONE if row.role == "original" else humans.change(row.parameters, row.reference_parameters)

    def show_memory(row: Row) -> str:
        """Return peak memory, with the device if the table mixes both kinds."""
        text = humans.memory(plain(row.memory))
        return f"{text} {'GPU' if row.on_gpu else 'CPU'}" if row.memory and len(kinds) > 1 else text

    return by_key(
        [
            Column("name", head, "name", left=True),
            Column("layers_heads", "L x\nheads", lambda r: r.shape and f"{r.shape['depth']}x{r.shape['heads']}"),
            Column("seeds", "seeds", lambda r: len(r.seeds), lambda seeds: str(seeds or NONE)),
            *([Column("metric", task.label, "metric", shown)] if task else []),
            *([Column(key, head, key, shown) for key, head in heads.items()] if task else []),
            Column("loss", "loss", "loss", partial(show_spread, decimals=4, percent=False)),
            Column("parameters", "params", "parameters", partial(humans.count, short=short)),
            Column("change", "change", lambda row: row, show_change, lambda row: row.change),
            *(Column(f"parameters_{key}", key, f"parts.{key}", humans.count) for key in PARTS),
            *(Column(key, head, f"shape.{key}") for key, head in zip(SHAPE, SHAPE_HEADS, strict=True)),
            Column("size", "size", "size", humans.memory),
            Column("inference_memory", "memory", "inference_memory", humans.memory),
            Column("latency", "latency", "latency", show_seconds, median),
            Column("batch_latency", "batch\nlatency", "batch_latency", show_seconds, median),
            Column("memory", memory_head, lambda row: row, show_memory, lambda row: plain(row.memory)),
            Column("step_ms", "ms/\nstep", "step_ms", of_mean(humans.plain)),
            Column(  # without decimals from a hundred per second on
                "throughput",
                unit,
                "throughput",
                of_mean(lambda value: humans.count(value) if (value or 0) >= 100 else humans.plain(value)),
            ),
            Column("seconds", "time", "seconds", of_mean(humans.seconds)),
            Column("kappa_mean", "kappa\nmean", "kappa.mean"),
            Column("kappa_median", "kappa\nmedian", "kappa.median"),
            Column("kappa_worst", "kappa\nworst", "kappa.worst"),
            Column("rank", "rank", "kappa.poorest", show_rank, show_rank),
            Column("kappa_centred", "kappa\ncentred", "kappa.centred"),
            Column("deficient", "rank-\ndeficient", "kappa.deficient", humans.count),
            Column("kappa_output", "kappa\nA W_o", "kappa.output"),
            Column("kappa_jacobian", "kappa\nJacobian", "kappa.jacobian"),
        ]
    )


SHAPE_HEADS = ("layers", "heads", "head\ndim", "MLP")


def define_layer_columns(section: Section | None = None) -> dict[str, Column]:
    """Return every column of a table of layers."""
    kappas = {"mean": "kappa\nmean", "median": "kappa\nmedian", "worst": "kappa\nworst", "centred": "kappa\ncentred"}
    kappas |= {"output": "A W_o", "jacobian": "Jaco-\nbian"}
    figures = {"stable_rank": "stable\nrank", "effective_rank": "eff.\nrank", "aspect": "h*d/N"}
    products = {"vo": "W_o W_v", "qk": "W_q' W_k"}
    name = [define_columns(section)["name"].head] if section else []
    return by_key(
        [
            *(Column("name", head, "row.name", left=True) for head in name),
            Column("layer", "layer", "layer.layer"),
            *(Column(f"kappa_{key}", head, f"layer.{key}") for key, head in kappas.items()),
            Column("rank", "rank", "layer", show_rank, show_rank),
            Column("deficient", "lost", "layer.deficient"),
            *(Column(key, head, f"layer.{key}", humans.plain) for key, head in figures.items()),
            Column("kappa_input", "A", "layer.median"),
            *(Column(f"kappa_w_{key}", f"W_{key}", f"layer.weights.{key}") for key in MATRICES),
            *(Column(f"kappa_{key}", head, f"layer.weights.{key}") for key, head in products.items()),
        ]
    )


def list_layers(section: Section) -> list[LayerRow]:
    """Return every layer of every row that has condition numbers."""
    return [LayerRow(row, layer) for row in section.rows if row.kappa for layer in row.kappa.layers]


def pick(columns: Mapping[str, Column], keys: Iterable[str]) -> list[Column]:
    """Return the existing columns with these keys, in the order of the keys."""
    return [columns[key] for key in keys if key in columns]


def pick_columns(section: Section, *, wide: bool = False, short: bool = False) -> list[Column]:
    """Return the columns of a section: those of the default table, or all of them."""
    if section.kind == "glue":

        def show_mean(row: Row) -> str:
            """Return the mean of all eight tasks, or how many there are so far."""
            mean = row.mean_of_scores
            return f"{len(row.scores or {})} of {len(GLUE)}" if mean is None else f"{100 * mean:.1f}"

        # In per cent, without their spread, which would not fit beside nine numbers.
        score = of_mean(lambda value: NONE if value is None else f"{100 * value:.1f}")
        tasks = [Column(key, shown, f"scores.{key}", score) for key, shown in GLUE.items()]
        mean = Column("mean", "mean", lambda row: row, show_mean, lambda row: row.mean_of_scores)
        return [Column("name", "model", "name", left=True), *tasks, mean]
    columns = define_columns(section, short=short)
    narrow = MODELS if section.kind == "models" else ANSWERING if any(row.latency for row in section.rows) else NARROW
    return pick(columns, [key for key in columns if key != "layers_heads"] if wide else narrow)


def lay_out(section: Section, wide: bool, kappa: bool) -> tuple[Sequence[TableRow], list[Column]]:
    """Return the rows of a table (layers with `kappa`) and its non-empty columns."""
    if kappa:
        rows = list_layers(section)
        return rows, without_gaps(pick(define_layer_columns(section), LAYERS + WEIGHTS * wide), rows)
    return section.rows, without_gaps(pick_columns(section, wide=wide), section.rows)


def rename(columns: Sequence[Column], heads: Mapping[str, str]) -> list[Column]:
    """Return the columns with other heads, by key."""
    return [replace(column, head=heads.get(column.key, column.head)) for column in columns]


def without_gaps(columns: Iterable[Column], rows: Sequence[TableRow]) -> list[Column]:
    """Return the columns with a value in at least one row; the name always stays."""
    return [c for c in columns if c.key == "name" or any(c.cell(row) != NONE for row in rows)]
