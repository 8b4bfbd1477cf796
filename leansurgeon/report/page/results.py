"""Parts of a section that show figures: results, starting points, conditioning, memory and speed in trainings, and what
`leansurgeon bench` has timed apart from them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from leansurgeon.report import humans
from leansurgeon.report.charts.sections import of_section, prediction_of
from leansurgeon.report.evidence.run import SHAPE
from leansurgeon.report.evidence.studies import Bench, BenchRow
from leansurgeon.report.humans import NONE
from leansurgeon.report.page.blocks import Block, Cell, cell, figures, folded, grid, table, words
from leansurgeon.report.rows.rows import Row, Section
from leansurgeon.report.tables.columns import (
    SHARED,
    Column,
    columns,
    invariant_columns,
    layer_columns,
    layer_rows,
    layers_heads_column,
    without_gaps,
)

RESULTS = ("name", "seeds", "layers_heads", "before", "metric", "test", "loss", "parameters", "change")
RESULTS += ("kappa_median", "kappa_worst", "kappa_output", "kappa_jacobian")
MODELS = ("name", *SHAPE, "parameters", "change")
LAYERS = "Kappa of what enters the output projection"
COST = ("name", "memory", "step_ms", "throughput", "seconds")
STARTS = {
    "transfer": "ours: cut from trained weights",
    "fresh": "fresh: the paper's way",
    "fresh-attention": "fresh attention, the rest kept",
}


def chosen(section: Section, keys: Iterable[str]) -> list[Column]:
    """Those of the columns with these keys that the section has, in the order asked for."""
    known = {c.key: c for c in [*columns(section, wide=True), layers_heads_column()]}
    return [known[key] for key in keys if key in known]


def results(section: Section) -> list[Block]:
    """The table of results with its charts; for GLUE the nine tasks only."""
    if section.kind == "glue":
        return grid("Results", section.rows, columns(section), hidden=True)
    keys = MODELS if section.kind == "models" else RESULTS
    shown = grid("Results", section.rows, chosen(section, keys), hidden=True)
    return [*figures(of_section(section, "Results")), *shown]


def starts(section: Section) -> list[Block]:
    """Every arm by what it starts from, before and after training."""
    rows = [row for row in section.rows if row.before and row.metric]
    if section.task is None or not rows:
        return []

    def name(row: Row) -> str:
        """What the row's weights started from, in words."""
        if row.role == "original":
            return "the original"
        return STARTS.get(row.init or (row.cut.record.initialised if row.cut else ""), NONE)

    def epochs(row: Row) -> str:
        """The epochs trained, after those that its start was trained before."""
        if row.epochs is None:
            return NONE
        before = f"{row.inherited:.3g} + " if row.inherited else ""
        return f"{before}{row.epochs:.3g}"

    known = {c.key: c for c in chosen(section, ("name", "layers_heads", "before", "metric"))}
    heads = {"before": "before training", "metric": "after training"}
    shown = [
        known["name"],
        Column("start", "start", name),
        known["layers_heads"],
        *(replace(known[key], head=heads[key]) for key in heads),
        Column("epochs", "epochs", epochs),
    ]
    return grid(f"{section.task.label} by starting point", rows, shown, hidden=True)


def conditioning(section: Section) -> list[Block]:
    """Kappa layer by layer: charts, and behind a fold the tables with rank and every other measure."""
    rows = layer_rows(section)
    if not rows:
        return []
    tables = grid(LAYERS, rows, layer_columns(section), cards=False)
    extra = without_gaps(invariant_columns(section), rows)
    extra = [replace(c, head=c.head.replace("Jaco-\nbian", "Jacobian")) for c in extra]  # there is room for it here
    says = "Kappa that depends on the basis of the heads (A, W_q to W_o) beside what does not (the rest)"
    tables += grid(says, rows, extra, cards=False) if len(extra) > len(SHARED) else []
    return [*figures(of_section(section, "Conditioning")), *folded("Every layer in figures, with ranks", tables)]


def cost(section: Section) -> list[Block]:
    """Memory and speed as the trainings saw them; the prediction beside the measurement where there is one."""
    rows = [row for row in section.rows if row.memory or row.step_ms]
    if not rows:
        return []

    chosen_columns = chosen(section, COST)
    after = 1 + next(i for i, c in enumerate(chosen_columns) if c.key == "memory")
    chosen_columns.insert(
        after, Column("predicted", "predicted", lambda row: (p := prediction_of(row)) and p.total, humans.memory)
    )
    shown = grid("Memory and speed of training", rows, chosen_columns, hidden=True)
    return [*shown, *figures(of_section(section, "Memory and speed"))]


def benches(section: Section) -> list[Block]:
    """One table for every row whose folder holds `bench.json`, of its first seed that has one."""
    made: list[Block] = []
    for row in section.rows:
        measured = next((run.bench for run in row.runs if run.bench), None)
        made += bench(row.name, measured) if measured else []
    return made


def bench(name: str, measured: Bench) -> list[Block]:
    """Step, latency, throughput and peak memory of a model's shapes and attention backends, and what was remarked."""
    heads = ["", "backend", "step, ms", "forward of one sample, ms", "forward of a batch, ms"]
    heads += [f"training, {measured.unit}/s", f"forward, {measured.unit}/s", "peak", "step against the first"]
    load = measured.load
    says = f"{name}: batch {load.batch or '?'}"
    says += f" of {load.tokens:,} tokens" if load.tokens and measured.unit == "tokens" else ""
    says += f", {load.precision}, on {measured.device}"
    says += f"; medians of {f'{load.rounds:,} ' if load.rounds else ''}interleaved rounds, new weights"
    rows = [cells(row, first=i == 0) for i, row in enumerate(measured.rows)]
    peak = [f"Peak: {measured.peak_memory_kind}."] if measured.peak_memory_kind else []
    return [table(says, heads, rows), *words(peak, "quiet"), *words((*measured.skipped, *measured.remarks))]


def cells(row: BenchRow, *, first: bool) -> list[Cell]:
    """One row of the table of speeds: times in ms, samples per second, memory, and the verdict on the first row."""
    times = [None if (t := row.time(key)) is None else 1000 * t for key in ("step", "forward_1", "forward")]
    plain = [*times, row.training_per_second, row.forward_per_second]
    against = row.step_against_first
    # There is no sameness: rounds disagree.
    verdict = "" if first else {"same": "not told apart"}.get(against.verdict, against.verdict)
    return [
        cell(row.name),
        cell(row.backend or NONE),
        *(cell(humans.plain(value), value) for value in plain),
        cell(humans.memory(row.peak_memory), row.peak_memory),
        cell(humans.plain(against.median), against.median, f"({verdict})" if verdict else ""),
    ]
