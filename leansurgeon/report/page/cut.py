"""What was cut and why, from `surgery.json`: operators, choices, proof, starting points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from leansurgeon.checkpoints.recorded.decided import Decisions, Tried
from leansurgeon.errors import plural
from leansurgeon.reading.values import words
from leansurgeon.report import humans
from leansurgeon.report.charts.sections import of_section
from leansurgeon.report.evidence.run import PARTS, SHAPE
from leansurgeon.report.evidence.surgery import Cut
from leansurgeon.report.humans import NONE, listed
from leansurgeon.report.page.blocks import Block, Group, Line, Words, cell, figures, grid, table
from leansurgeon.report.page.results import chosen
from leansurgeon.report.rows.rows import Row, Section
from leansurgeon.report.tables.columns import Column
from leansurgeon.shape import NUMBERS, Shape
from leansurgeon.shape import PARTS as PART_LABELS

SHAPES = ("name", *SHAPE, *(f"parameters_{key}" for key in PARTS), "parameters", "change")
CANDIDATES = 6  # that are shown of one kind
GET_STARTS = (
    "A naive start (layers at equal spacing, heads renumbered) beside fresh and ours, on the same held-out samples: "
    "`leansurgeon shrink SOURCE ... --compare`, before the training."
)


def surgeries(section: Section) -> list[Block]:
    """One block for every row whose shape is not that of its source; the shapes of an experiment in one table."""
    together = section.kind == "experiment"
    made = [
        Group(row.name, tuple(cut(row, row.cut, together))) for row in section.rows if row.cut and row.cut.changes_shape
    ]
    if not made:
        return []
    shapes = grid("Shape, and parameters by part", section.rows, named(chosen(section, SHAPES))) if together else []
    return [*shapes, *figures(of_section(section, "What was cut, and why")), *made]


def named(columns: Sequence[Column]) -> list[Column]:
    """Heads that tell the width of the MLP from its parameters."""
    heads = {"mlp_dim": "MLP width", "parameters": "all params"}
    heads |= {f"parameters_{key}": f"{PART_LABELS[key]} params" for key in PARTS}
    return [replace(column, head=heads.get(column.key, column.head)) for column in columns]


def cut(row: Row, made: Cut, together: bool) -> list[Block]:
    """What was done to the source and why, from its surgery's record."""
    digests = [f"{name} {digest[:16]}…" for name, digest in words(made.record.source.sha256).items()]
    weights = f" (SHA-256 of its weights: {', '.join(digests)})" if digests else ""
    said = [
        Line(f"From `{shortened(made.source)}`{weights}."),
        Line(saving(made)),
        *(Line(f" ({o.exactness}): {o.says}", o.name) for o in made.plan.operators),
        Line(f"{made.plan.why.rstrip('.')}." if made.plan.why else ""),
        *map(Line, choices(made.record.decided)),
        *map(Line, other_seeds(row, made)),
        Line(made.proven or "Proof: not reloaded after writing."),
        Line(made.compared),
    ]
    return [
        Words(tuple(line for line in said if line.text)),
        *([] if together else [change_table(row.name, made)]),
        *candidates([c for c in made.record.decided.candidates if c.score.judged_by is not None]),
        *compared_starts(row.name, made),
    ]


def shortened(path: str) -> str:
    """The last three parts of a path: who gets the page need not know this machine's folders."""
    parts = path.replace("\\", "/").split("/")
    return path if len(parts) <= 3 else "…/" + "/".join(parts[-3:])


def change_table(name: str, made: Cut) -> Block:
    """Shape and parameters by part, before and after."""
    rows = []
    for key in ("depth", "heads", "head_dim", "kv_heads", "mlp_dim", "width"):
        cells = [
            ", ".join(f"{value:,}" for value in values_of(side, key)) or NONE
            for side in (made.plan.before, made.plan.after)
        ]
        rows.append([cell(NUMBERS[key]), *map(cell, cells), cell("")])
    for key, label in PART_LABELS.items():
        old, new = made.plan.parameters_before.get(key), made.plan.parameters_after.get(key)
        if old is not None or new is not None:
            changed = "" if old == new else humans.change(new, old) if old else "new"
            rows.append([cell(f"parameters, {label}"), *(cell(humans.count(v), v) for v in (old, new)), cell(changed)])
    return table(f"{name}: before and after the cut", ["", "before", "after", "change"], rows, cards=False)


def values_of(shape: Shape | None, key: str) -> list[int]:
    """One number of every stage."""
    return [getattr(stage, key) for stage in shape.stages] if shape else []


def saving(made: Cut) -> str:
    """How many parameters each step of the surgery took away, in one line."""
    known = [f"{key} {-value:+,.0f}" for key, value in made.plan.saved_by.items() if value]
    order = " (in this order)" if len(known) > 1 else ""
    return f"Change in parameters by {listed(known)}{order}." if known else ""


# -- choices --------------------------------------------------------------------------------------


def choices(choice: Decisions) -> list[str]:
    """What was decided on sample data."""
    said = []
    if (data := choice.calibration) and (data.says or data.sha256):
        said.append(f"Sample data: {data.says}, SHA-256 {data.sha256[:16]}…")
    if choice.layers:
        by = f", chosen by {choice.criterion}." if choice.criterion else "."
        said.append(f"Layers kept (from 0): {', '.join(map(str, choice.layers))}{by}")
    if choice.changed_tensors:
        said.append(f"{plural(choice.changed_tensors, 'tensor')} refitted or made anew on the sample data.")
    return said


def candidates(tried: Sequence[Tried]) -> list[Block]:
    """The sets of layers that competed, best first, every one after its own refit. Those judged on all of the data and
    those judged on a part of it have a table each: their figures are not comparable.
    """
    if len(tried) < 2:
        return []
    last, first = ([c for c in tried if (c.data == "part") is part] for part in (False, True))
    says = "Sets of layers that were tried, on guard samples (smaller is better)"
    if not (last and first):
        return [ranking(says, tried)]
    return [
        ranking(f"{says}: on all of the data, which decides", last),
        ranking(f"{says}: on a part of the data, to choose which of them compete again", first),
    ]


def ranking(says: str, tried: Sequence[Tried]) -> Block:
    """The best candidates for the layers to keep, by how far their output is off; the count of those left out."""
    best = sorted(tried, key=lambda c: c.score.judged_by)[:CANDIDATES]
    left = f"; {len(tried) - len(best)} more were worse" if len(tried) > len(best) else ""
    rows = [
        [
            cell(c.criterion or NONE),
            cell(", ".join(map(str, c.kept)) or NONE),
            cell(", ".join(refitted(c))),
            cell(f"{c.score.judged_by:.4g}", c.score.judged_by),
        ]
        for c in best
    ]
    return table(f"{says}{left}", ["chosen by", "layers kept", "refitted", "off by"], rows, cards=False)


def refitted(candidate: Tried) -> tuple[str, ...]:
    """What of a candidate was fitted anew before it was judged."""
    ways = ((candidate.attention, "attention"), (candidate.later, "later layers"))
    return ("MLP", *(word for done, word in ways if done))


def other_seeds(row: Row, made: Cut) -> list[str]:
    """Where seeds kept other layers than the one that is shown, which."""
    return [
        f"Seed {run.summary.seed} kept other layers: {', '.join(map(str, run.cut.plan.layers))}."
        for run in row.runs
        if run.cut and run.cut is not made and run.cut.plan.layers and run.cut.plan.layers != made.plan.layers
    ]


# -- starting points ------------------------------------------------------------------------------


def compared_starts(name: str, made: Cut) -> list[Block]:
    """Source, fresh, naive and ours on the same held-out samples (`shrink --compare`), before any training."""
    if not made.starts:
        return []
    heads = list(dict.fromkeys(key for row in made.starts for key in row))
    rows = [[cell(row.get(key, NONE)) for key in heads] for row in made.starts]
    return [table(f"{name}: starting points before any training, on the same held-out samples", heads, rows)]


def cut_but_not_compared(section: Section) -> bool:
    """Whether something was cut from trained weights here, and nowhere compared with a fresh and a naive start."""
    cuts = [run.cut for run in section.runs if run.cut]
    return any(c.record.initialised == "transfer" for c in cuts) and not any(c.starts for c in cuts)
