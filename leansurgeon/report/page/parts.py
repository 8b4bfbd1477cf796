"""Parts of a section that show figures: results, starting points, what was cut and why (from `surgery.json`), the
conditioning, memory and speed in trainings, and what `leansurgeon bench` has timed apart from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from leansurgeon.checkpoints.recorded.decided import Tried
from leansurgeon.errors import plural
from leansurgeon.reading.values import words
from leansurgeon.report import humans
from leansurgeon.report.charts.sections import of_section, prediction_of
from leansurgeon.report.evidence.run import PARTS, SHAPE
from leansurgeon.report.evidence.studies import Bench, BenchRow
from leansurgeon.report.evidence.surgery import Cut
from leansurgeon.report.humans import NONE, listed
from leansurgeon.report.page.blocks import Block, Cell, Group, Line, Table, Words, cell, figures, grid, sentences
from leansurgeon.report.rows.rows import Row, Section
from leansurgeon.report.tables.columns import (
    INVARIANTS,
    LAYERS,
    Column,
    define_columns,
    define_layer_columns,
    list_layers,
    pick,
    pick_columns,
    without_gaps,
)
from leansurgeon.shape import NUMBERS, Shape
from leansurgeon.shape import PARTS as PART_LABELS

RESULTS = ("name", "seeds", "layers_heads", "before", "metric", "test", "loss", "parameters", "change")
RESULTS += ("kappa_median", "kappa_worst", "kappa_output", "kappa_jacobian")
MODELS = ("name", *SHAPE, "parameters", "change")
SHAPES = ("name", *SHAPE, *(f"parameters_{key}" for key in PARTS), "parameters", "change")
SHAPE_HEADS = {"mlp_dim": "MLP width", "parameters": "all params"}
SHAPE_HEADS |= {f"parameters_{key}": f"{PART_LABELS[key]} params" for key in PARTS}
COST = ("name", "memory", "predicted", "step_ms", "throughput", "seconds")
LAYERS_CAPTION = "Kappa of what enters the output projection"
STARTS = {
    "transfer": "ours: cut from trained weights",
    "fresh": "fresh: the paper's way",
    "fresh-attention": "fresh attention, the rest kept",
}
CANDIDATES = 6  # that are shown of one kind
GET_STARTS = (
    "A naive start (layers at equal spacing, heads renumbered) beside fresh and ours, on the same held-out samples: "
    "`leansurgeon shrink SOURCE ... --compare`, before the training."
)


def rename(columns: Sequence[Column], heads: Mapping[str, str]) -> list[Column]:
    """The columns with other heads, by key."""
    return [replace(column, head=heads.get(column.key, column.head)) for column in columns]


def show_results(section: Section) -> list[Block]:
    """The table of results with its charts; for GLUE the nine tasks only."""
    if section.kind == "glue":
        return [grid("Results", section.rows, pick_columns(section), hidden=True)]
    columns = pick(define_columns(section), MODELS if section.kind == "models" else RESULTS)
    return [*figures(of_section(section, "Results")), grid("Results", section.rows, columns, hidden=True)]


def show_starts(section: Section) -> list[Block]:
    """Every arm by what it starts from, before and after training."""
    rows = [row for row in section.rows if row.before and row.metric]
    if section.task is None or not rows:
        return []

    def start(row: Row) -> str | None:
        """What the row's weights started from, in words."""
        if row.role == "original":
            return "the original"
        return STARTS.get(row.init or (row.cut.record.initialised if row.cut else ""))

    def epochs(row: Row) -> str | None:
        """The epochs trained, after those that its start was trained before."""
        if row.epochs is None:
            return None
        before = f"{row.inherited_epochs:.3g} + " if row.inherited_epochs else ""
        return f"{before}{row.epochs:.3g}"

    columns = define_columns(section) | {
        "start": Column("start", "start", start),
        "epochs": Column("epochs", "epochs", epochs),
    }
    shown = pick(columns, ("name", "start", "layers_heads", "before", "metric", "epochs"))
    shown = rename(shown, {"before": "before training", "metric": "after training"})
    return [grid(f"{section.task.label} by starting point", rows, shown, hidden=True)]


def show_conditioning(section: Section) -> list[Block]:
    """Kappa layer by layer: charts, and behind a fold the tables with rank and every other measure."""
    rows, columns = list_layers(section), define_layer_columns(section)
    if not rows:
        return []
    tables = [grid(LAYERS_CAPTION, rows, pick(columns, LAYERS), cards=False)]
    extra = without_gaps(pick(columns, INVARIANTS), rows)
    says = "Kappa that depends on the basis of the heads (A, W_q to W_o) beside what does not (the rest)"
    tables += [grid(says, rows, extra, cards=False)] if len(extra) > 3 else []
    fold = Group("Every layer in figures, with ranks", tuple(tables), folded=True)
    return [*figures(of_section(section, "Conditioning")), fold]


def show_cost(section: Section) -> list[Block]:
    """Memory and speed as the trainings saw them; the prediction beside the measurement where there is one."""
    rows = [row for row in section.rows if row.memory or row.step_ms]
    if not rows:
        return []
    predicted = Column("predicted", "predicted", lambda row: (p := prediction_of(row)) and p.total, humans.memory)
    shown = pick(define_columns(section) | {"predicted": predicted}, COST)
    shown = grid("Memory and speed of training", rows, shown, hidden=True)
    return [shown, *figures(of_section(section, "Memory and speed"))]


def show_benches(section: Section) -> list[Block]:
    """One table for every row whose folder holds `bench.json`, of its first seed that has one."""
    found = [(row.name, next((run.bench for run in row.runs if run.bench), None)) for row in section.rows]
    return [block for name, bench in found if bench for block in show_bench(name, bench)]


def show_bench(name: str, bench: Bench) -> list[Block]:
    """Step, latency, throughput and peak memory of a model's shapes and attention backends, and what was remarked."""
    heads = ["", "backend", "step, ms", "forward of one sample, ms", "forward of a batch, ms"]
    heads += [f"training, {bench.unit}/s", f"forward, {bench.unit}/s", "peak", "step against the first"]
    load = bench.load
    says = f"{name}: batch {load.batch or '?'}"
    says += f" of {load.tokens:,} tokens" if load.tokens and bench.unit == "tokens" else ""
    says += f", {load.precision}, on {bench.device}"
    says += f"; medians of {f'{load.rounds:,} ' if load.rounds else ''}interleaved rounds, new weights"

    def cells(row: BenchRow) -> list[Cell]:
        """Times in ms, samples per second, memory, and the verdict on the first row."""
        times = [row.time(key) for key in ("step", "forward_1", "forward")]
        figures = [None if time is None else 1000 * time for time in times]
        figures += [row.training_per_second, row.forward_per_second]
        against = row.step_against_first
        # There is no sameness: rounds disagree.
        verdict = {"same": "not told apart"}.get(against.verdict, against.verdict) if row is not bench.rows[0] else ""
        return [
            cell(row.name),
            cell(row.backend or NONE),
            *(cell(humans.plain(value), value) for value in figures),
            cell(humans.memory(row.peak_memory), row.peak_memory),
            cell(humans.plain(against.median), against.median, f"({verdict})" if verdict else ""),
        ]

    peak = [f"Peak: {bench.peak_memory_kind}."] if bench.peak_memory_kind else []
    table = Table(says, heads, [cells(row) for row in bench.rows])
    return [table, *sentences(peak, "quiet"), *sentences((*bench.skipped, *bench.remarks))]


# -- cuts -----------------------------------------------------------------------------------------


def show_cuts(section: Section) -> list[Block]:
    """One block for every row whose shape is not that of its source; the shapes of an experiment in one table."""
    together = section.kind == "experiment"
    cuts = [
        Group(row.name, tuple(show_cut(row, row.cut, together)))
        for row in section.rows
        if row.cut and row.cut.changes_shape
    ]
    if not cuts:
        return []
    columns = rename(pick(define_columns(section), SHAPES), SHAPE_HEADS)
    shapes = [grid("Shape, and parameters by part", section.rows, columns)] if together else []
    return [*shapes, *figures(of_section(section, "What was cut, and why")), *cuts]


def show_cut(row: Row, cut: Cut, together: bool) -> list[Block]:
    """What was done to the source and why, from its surgery's record."""
    decided, plan = cut.record.decided, cut.plan
    digests = [f"{name} {digest[:16]}…" for name, digest in words(cut.record.source.sha256).items()]
    weights = f" (SHA-256 of its weights: {', '.join(digests)})" if digests else ""
    saved = [f"{key} {-value:+,.0f}" for key, value in plan.saved_by.items() if value]
    order = " (in this order)" if len(saved) > 1 else ""
    data, by = decided.calibration, f", chosen by {decided.criterion}" if decided.criterion else ""
    said = [
        Line(f"From `{shorten(cut.source)}`{weights}."),
        Line(f"Change in parameters by {listed(saved)}{order}." if saved else ""),
        *(Line(f" ({o.exactness}): {o.says}", o.name) for o in plan.operators),
        Line(f"{plan.why.rstrip('.')}." if plan.why else ""),
        Line(f"Sample data: {data.says}, SHA-256 {data.sha256[:16]}…" if data and (data.says or data.sha256) else ""),
        Line(f"Layers kept (from 0): {', '.join(map(str, decided.layers))}{by}." if decided.layers else ""),
        Line(
            f"{plural(decided.changed_tensors, 'tensor')} refitted or made anew on the sample data."
            if decided.changed_tensors
            else ""
        ),
        *(
            Line(f"Seed {run.summary.seed} kept other layers: {', '.join(map(str, run.cut.plan.layers))}.")
            for run in row.runs
            if run.cut and run.cut is not cut and run.cut.plan.layers not in ((), plan.layers)
        ),
        Line(cut.proven or "Proof: not reloaded after writing."),
        Line(cut.compared),
    ]
    blocks = [Words(tuple(line for line in said if line.text))]
    blocks += [] if together else [compare_shapes(row.name, cut)]
    blocks += rank_candidates([c for c in decided.candidates if c.score.judged_by is not None])
    if cut.starts:
        heads = list(dict.fromkeys(key for start in cut.starts for key in start))
        rows = [[cell(start.get(key, NONE)) for key in heads] for start in cut.starts]
        says = f"{row.name}: starting points before any training, on the same held-out samples"
        blocks.append(Table(says, heads, rows))
    return blocks


def shorten(path: str) -> str:
    """The last three parts of a path: who gets the page need not know this machine's folders."""
    parts = path.replace("\\", "/").split("/")
    return path if len(parts) <= 3 else "…/" + "/".join(parts[-3:])


def compare_shapes(name: str, cut: Cut) -> Table:
    """Shape and parameters by part, before and after."""
    rows = []
    for key in ("depth", "heads", "head_dim", "kv_heads", "mlp_dim", "width"):
        sides = (numbers_of(side, key) for side in (cut.plan.before, cut.plan.after))
        shown = [cell(", ".join(f"{value:,}" for value in side) or NONE) for side in sides]
        rows.append([cell(NUMBERS[key]), *shown, cell("")])
    for key, label in PART_LABELS.items():
        old, new = cut.plan.parameters_before.get(key), cut.plan.parameters_after.get(key)
        if old is not None or new is not None:
            changed = "" if old == new else humans.change(new, old) if old else "new"
            rows.append([cell(f"parameters, {label}"), *(cell(humans.count(v), v) for v in (old, new)), cell(changed)])
    return Table(f"{name}: before and after the cut", ["", "before", "after", "change"], rows, cards=False)


def numbers_of(shape: Shape | None, key: str) -> list[int]:
    """One number of every stage."""
    return [getattr(stage, key) for stage in shape.stages] if shape else []


def rank_candidates(tried: Sequence[Tried]) -> list[Table]:
    """The sets of layers that competed, best first, every one after its own refit. Those judged on all of the data and
    those judged on a part of it have a table each: their figures are not comparable.
    """
    if len(tried) < 2:
        return []
    last, first = ([c for c in tried if (c.data == "part") is part] for part in (False, True))
    kinds = {": on all of the data, which decides": last}
    kinds |= {": on a part of the data, to choose which of them compete again": first}
    tables = []
    for says, several in kinds.items() if last and first else [("", tried)]:
        best = sorted(several, key=lambda c: c.score.judged_by)[:CANDIDATES]
        left = f"; {len(several) - len(best)} more were worse" if len(several) > len(best) else ""
        caption = f"Sets of layers that were tried, on guard samples (smaller is better){says}{left}"
        rows = []
        for c in best:
            refitted = ["MLP"] + ["attention"] * bool(c.attention) + ["later layers"] * bool(c.later)
            kept = ", ".join(map(str, c.kept)) or NONE
            judged = cell(f"{c.score.judged_by:.4g}", c.score.judged_by)
            rows.append([cell(c.criterion or NONE), cell(kept), cell(", ".join(refitted)), judged])
        tables.append(Table(caption, ["chosen by", "layers kept", "refitted", "off by"], rows, cards=False))
    return tables


def lacks_starts(section: Section) -> bool:
    """Whether something was cut from trained weights here, and nowhere compared with a fresh and a naive start."""
    cuts = [run.cut for run in section.runs if run.cut]
    return any(c.record.initialised == "transfer" for c in cuts) and not any(c.starts for c in cuts)
