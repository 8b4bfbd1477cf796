"""The parts of a section: results, what was cut and why (from `surgery.json`), conditioning, memory and speed in
trainings, and the results of `leansurgeon bench`; and the blocks that a part consists of: tables, charts, sentences,
code, facts, groups. The templates define the look of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leansurgeon.errors import plural
from leansurgeon.reading.jsonfile import Json, value_at
from leansurgeon.reading.values import items, text, whole, words
from leansurgeon.report.charts.forms import Chart
from leansurgeon.report.charts.sections import of_section
from leansurgeon.report.humans import NONE, join_words, memory, plain
from leansurgeon.report.rows import Section
from leansurgeon.report.runs import PARTS, SHAPE, describe_comparison, describe_proof
from leansurgeon.report.tables.columns import (
    INVARIANTS,
    LAYERS,
    MODELS,
    Column,
    TableRow,
    define_columns,
    define_layer_columns,
    list_layers,
    pick,
    pick_columns,
    rename,
    without_gaps,
)
from leansurgeon.report.tables.cut import list_candidates, parameters, shapes
from leansurgeon.shape import PARTS as PART_LABELS


@dataclass(frozen=True)
class Cell:
    """A value as text, the number itself for programs, and a word after it."""

    text: str
    value: float | None = None
    beside: str = ""


@dataclass(frozen=True)
class Table:
    """A table whose first column names the row.

    On a narrow screen, `cards` shows each row as a block (labels before values); else the table scrolls. `hidden` shows
    the caption to screen readers only.
    """

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    cards: bool = True
    hidden: bool = False


@dataclass(frozen=True)
class Figures:
    """Charts side by side."""

    charts: tuple[Chart, ...]


@dataclass(frozen=True)
class Line:
    """A sentence in which `backticks` mark what is typed, after a bold word."""

    text: str
    strong: str = ""


@dataclass(frozen=True)
class Words:
    """Sentences as a list. `look` is "", "quiet", "lead" or "warn"."""

    lines: tuple[Line, ...]
    look: str = ""


@dataclass(frozen=True)
class Code:
    """What is typed or stored in a file, as it is."""

    text: str


@dataclass(frozen=True)
class Facts:
    """Pairs of name and value."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Group:
    """Blocks under a heading; if `folded`, the reader opens it."""

    title: str
    blocks: tuple[Block, ...]
    folded: bool = False


@dataclass(frozen=True)
class Examples:
    """Real samples: `text`, or `image` as a data URL, with `pairs` of model and answer."""

    samples: tuple[Mapping[str, Any], ...]


Block = Table | Figures | Words | Code | Facts | Group | Examples


@dataclass(frozen=True)
class Part:
    """One heading of a section with its blocks; `caveats` come before them."""

    title: str
    blocks: tuple[Block, ...]
    caveats: tuple[str, ...] = ()


def cell(shown: str, value: str | float | None = None, beside: str = "") -> Cell:
    """Return a cell that shows `shown` and sorts by `value`, if that is a number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and shown != NONE
    return Cell(shown, value if is_number else None, beside)


def sentences(lines: Iterable[str], look: str = "") -> list[Block]:
    """Return sentences as a block; an empty list without any."""
    said = tuple(Line(line) for line in lines if line)
    return [Words(said, look)] if said else []


def figures(charts: Sequence[Chart]) -> list[Block]:
    """Return the charts as one block; an empty list without charts."""
    return [Figures(tuple(charts))] if charts else []


def grid(
    caption: str, rows: Sequence[TableRow], columns: Sequence[Column], *, cards: bool = True, hidden: bool = False
) -> Table:
    """Return a table of columns; if a column has a number behind its text, the page holds it too."""
    columns = without_gaps(columns, rows)
    cells = [[cell(c.cell(row), c.raw(row) if i else None) for i, c in enumerate(columns)] for row in rows]
    return Table(caption, [c.title for c in columns], cells, cards, hidden)


RESULTS = ("name", "seeds", "layers_heads", "before", "metric", "test", "loss", "parameters", "change")
RESULTS += ("kappa_median", "kappa_worst", "kappa_output", "kappa_jacobian")
SHAPES = ("name", *SHAPE, *(f"parameters_{key}" for key in PARTS), "parameters", "change")
SHAPE_HEADS = {"mlp_dim": "MLP width", "parameters": "all params"}
SHAPE_HEADS |= {f"parameters_{key}": f"{PART_LABELS[key]} params" for key in PARTS}
COST = ("name", "size", "inference_memory", "latency", "batch_latency", "memory", "step_ms", "throughput", "seconds")
LAYERS_CAPTION = "Kappa of what enters the output projection"


def show_results(section: Section) -> list[Block]:
    """Return the table of results with its charts; for GLUE only the table of tasks."""
    if section.kind == "glue":
        return [grid("Results", section.rows, pick_columns(section), hidden=True)]
    columns = pick(define_columns(section), MODELS if section.kind == "models" else RESULTS)
    return [*figures(of_section(section, "Results")), grid("Results", section.rows, columns, hidden=True)]


def show_conditioning(section: Section) -> list[Block]:
    """Return kappa layer by layer: charts, and folded tables with rank and all other measures."""
    rows, columns = list_layers(section), define_layer_columns(section)
    if not rows:
        return []
    tables = [grid(LAYERS_CAPTION, rows, pick(columns, LAYERS), cards=False)]
    extra = without_gaps(pick(columns, INVARIANTS), rows)
    says = "Kappa that depends on the basis of the heads (A, W_q to W_o) beside what does not (the rest)"
    tables += [grid(says, rows, extra, cards=False)] if len(extra) > 3 else []
    fold = Group("Every layer in figures, with ranks", tuple(tables), folded=True)
    return [*figures(of_section(section, "Conditioning")), fold]


def show_changes(section: Section) -> list[Block]:
    """Return held-out samples that the models answer differently, and confusion matrices."""
    document = next((found for run in section.runs if (found := run.changes)), {})
    says = {
        "classes": "Answers differ on {differ} of {samples} held-out samples; of these, with what is true:",
        "neighbours": "{differ} of {samples} held-out sentences have another nearest neighbour; of these:",
        "texts": "Held-out beginnings, continued with the likeliest tokens:",
        "masks": "Hidden words are filled in differently in {differ} of {samples} held-out texts; in order:",
    }.get(text(document.get("kind")))
    if says is None:
        return []
    shown = []
    for one in items(document.get("shown")):
        truth = text(value_at(one, "truth"))
        pairs = [("truth", truth)] if truth else []
        pairs += [(text(name), text(said)) for name, said in objects_in(one, "answers")]
        shown.append({key: text(value_at(one, key)) for key in ("text", "image")} | {"pairs": pairs})
    numbers = {key: whole(document.get(key)) or 0 for key in ("differ", "samples")}
    lead = sentences(
        [says.format(**numbers) if shown else f"All answer alike on {numbers['samples']} samples."], "quiet"
    )
    classes, tables = [text(name) for name in items(document.get("classes"))], []
    for name, rows in objects_in(document, "confusion"):
        known = zip(classes, items(rows), strict=False)
        cells = [[cell(true), *(cell(str(n), n) for n in items(row))] for true, row in known]
        caption = f"{text(name)}: true classes down, answers across"
        tables.append(Table(caption, ["", *classes], cells, cards=False))
    fold = [Group("Which classes are mistaken for which", tuple(tables), folded=True)] if tables else []
    return [*lead, *([Examples(tuple(shown))] if shown else []), *fold]


def objects_in(document: Json, key: str) -> list[tuple[str, Json]]:
    """Return the entries of an object inside a document; none if there is no object."""
    found = value_at(document, key)
    return list(found.items()) if isinstance(found, dict) else []


def show_cost(section: Section) -> list[Block]:
    """Return memory and speed of inference, and as measured during the trainings."""
    rows = [row for row in section.rows if row.memory or row.step_ms or row.latency]
    if not rows:
        return []
    return [grid("Memory and speed", rows, pick(define_columns(section), COST), hidden=True)]


def show_benches(section: Section) -> list[Block]:
    """Return a table for every row whose folder holds `bench.json`, of its first seed that has one: step, latency,
    throughput and peak memory of the model's shapes and attention backends, with the remarks.
    """
    blocks = []
    for row in section.rows:
        bench = next((run.bench for run in row.runs if run.bench), None)
        if bench is None:
            continue
        heads = ["", "backend", "step, ms", "forward of one sample, ms", "forward of a batch, ms"]
        heads += [f"training, {bench.unit}/s", f"forward, {bench.unit}/s", "peak", "step against the first"]
        load, cells = bench.load, []
        says = f"{row.name}: batch {load.batch or '?'}"
        says += f" of {load.tokens:,} tokens" if load.tokens and bench.unit == "tokens" else ""
        says += f", {load.precision}, on {bench.device}"
        says += f"; medians of {f'{load.rounds:,} ' if load.rounds else ''}interleaved rounds, new weights"
        for timed in bench.rows:
            times = [timed.time(key) for key in ("step", "forward_1", "forward")]
            figures = [None if time is None else 1000 * time for time in times]
            figures += [timed.training_per_second, timed.forward_per_second]
            against = timed.step_against_first
            # Equality cannot be shown, since rounds vary.
            verdict = {"same": "not told apart"}.get(against.verdict, against.verdict)
            beside = f"({verdict})" if verdict and timed is not bench.rows[0] else ""
            cells.append(
                [
                    cell(timed.name),
                    cell(timed.backend or NONE),
                    *(cell(plain(value), value) for value in figures),
                    cell(memory(timed.peak_memory), timed.peak_memory),
                    cell(plain(against.median), against.median, beside),
                ]
            )
        peak = [f"Peak: {bench.peak_memory_kind}."] if bench.peak_memory_kind else []
        remarks = sentences((*bench.skipped, *bench.remarks))
        blocks += [Table(says, heads, cells), *sentences(peak, "quiet"), *remarks]
    return blocks


# -- cuts -----------------------------------------------------------------------------------------


def show_cuts(section: Section) -> list[Block]:
    """Return what was done to the source of every row whose shape changed, and why, from its surgery record; an
    experiment's shapes are in one table.
    """
    together, cuts = section.kind == "experiment", []
    for row in section.rows:
        cut = row.cut
        if not cut or cut.plan.before == cut.plan.after:
            continue
        decided, plan = cut.decided, cut.plan
        digests = [f"{name} {digest[:16]}…" for name, digest in words(cut.source.sha256).items()]
        weights = f" (SHA-256 of its weights: {', '.join(digests)})" if digests else ""
        saved = [f"{key} {-value:+,.0f}" for key, value in plan.saved_by.items() if value]
        order = " (in this order)" if len(saved) > 1 else ""
        data, by = decided.calibration, f", chosen by {decided.criterion}" if decided.criterion else ""
        sampled = data and (data.says or data.sha256)
        refitted = plural(decided.changed_tensors, "tensor") if decided.changed_tensors else ""
        said = [
            Line(f"From `{shorten(text(cut.source.name, '?'))}`{weights}."),
            Line(f"Change in parameters by {join_words(saved)}{order}." if saved else ""),
            *(Line(f" ({o.exactness}): {o.says}", o.name) for o in plan.operators),
            Line(f"{plan.why.rstrip('.')}." if plan.why else ""),
            Line(f"Sample data: {data.says}, SHA-256 {data.sha256[:16]}…" if sampled else ""),
            Line(f"Layers kept (from 0): {', '.join(map(str, decided.layers))}{by}." if decided.layers else ""),
            Line(f"{refitted} refitted or made anew on the sample data." if refitted else ""),
            *(
                Line(f"Seed {run.summary.seed} kept other layers: {', '.join(map(str, run.cut.plan.layers))}.")
                for run in row.runs
                if run.cut and run.cut is not cut and run.cut.plan.layers not in ((), plan.layers)
            ),
            Line(describe_proof(cut) or "Proof: not reloaded after writing."),
            Line(describe_comparison(cut)),
        ]
        blocks = [Words(tuple(line for line in said if line.text))]
        if not together and plan.before and plan.after:
            rows = shapes(plan.before, plan.after, ("depth", "heads", "head_dim", "kv_heads", "mlp_dim", "width"))
            rows += parameters(plan.parameters_before, plan.parameters_after)
            says, heads = f"{row.name}: before and after the cut", ["", "before", "after", "change"]
            blocks.append(Table(says, heads, [list(map(cell, line)) for line in rows], cards=False))
        heads, rows, note = list_candidates(decided)
        if rows:
            candidates = [[*map(cell, line[1:-1]), Cell(line[-1], beside="taken" if line[0] else "")] for line in rows]
            blocks.append(Table(f"Sets of layers that were tried. {note}", heads[1:], candidates, cards=False))
        cuts.append(Group(row.name, tuple(blocks)))
    if not cuts:
        return []
    columns = rename(pick(define_columns(section), SHAPES), SHAPE_HEADS)
    table = [grid("Shape, and parameters by part", section.rows, columns)] if together else []
    return [*table, *figures(of_section(section, "What was cut, and why")), *cuts]


def shorten(path: str) -> str:
    """Return the last three parts of a path: the reader of the page need not see this machine's folders."""
    parts = path.replace("\\", "/").split("/")
    return path if len(parts) <= 3 else "…/" + "/".join(parts[-3:])
