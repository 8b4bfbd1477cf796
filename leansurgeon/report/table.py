"""Print sections as a table for a terminal (80 columns by default), Markdown, CSV, JSON or LaTeX."""

from __future__ import annotations

import csv
import io
import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from tabulate import tabulate

from leansurgeon.errors import UsageError, did_you_mean
from leansurgeon.report.columns import (
    Column,
    bound_cell,
    columns,
    invariant_columns,
    layer_columns,
    layer_rows,
    rank_columns,
    without_gaps,
)
from leansurgeon.report.conditioning import as_dict
from leansurgeon.report.glue import mean_of
from leansurgeon.report.humans import NONE
from leansurgeon.report.notes import notes, title
from leansurgeon.report.rows import Row, Section, experiment_section
from leansurgeon.report.verdict import sentences, verdicts, warnings

FORMATS = ("table", "markdown", "csv", "json", "latex")
WIDTH = 80
SHARED = ("name", "layer", "kappa_median")  # the first columns of the second table of `--kappa`
SCHEMA_VERSION = 1
LAYERS_SHOWN = 10
SHORTEST_NAME = 10


def experiment_table(summaries: Iterable[dict], format: str = "table") -> str:
    """The table that ends `leansurgeon run`: arms with mean and spread over seeds, and what may be said about them.

    `summaries` are those of every training of the experiment, in the order of training.
    """
    return render(experiment_section(summaries), format)


def check_format(format: str) -> None:
    """Raises `UsageError` for what is none of `FORMATS`."""
    if format not in FORMATS:
        raise UsageError(
            f"There is no format '{format}'{did_you_mean(format, FORMATS)}.", f"Formats: {', '.join(FORMATS)}."
        )


def render(
    found: Sequence[Section],
    format: str = "table",
    *,
    wide: bool = False,
    kappa: bool = False,
    problems: Sequence[str] = (),
) -> str:
    """Text of the sections in one of `FORMATS`; only JSON carries `problems`.

    `wide` shows all columns, `kappa` one row per layer instead. Raises `UsageError` for another format.
    """
    check_format(format)
    if kappa:
        found = [s for s in found if layer_rows(s)]
        if not found:
            raise UsageError(
                "None of these runs measured kappa.",
                "`leansurgeon kappa RUN` measures it; or put `measure: {kappa: {}}` into the recipe.",
            )
    if format == "json":
        return json.dumps(document(found, problems), indent=2, ensure_ascii=False, allow_nan=False)
    if format == "csv":
        return _csv(found, kappa)
    write = {"table": _terminal, "markdown": _markdown, "latex": _latex}[format]
    return "\n\n".join(write(section, wide, kappa) for section in found)


# -- terminal -------------------------------------------------------------------------------------


def _terminal(section: Section, wide: bool, kappa: bool) -> str:
    rows, found = _chosen(section, wide, kappa)
    body, gone = (_grid(rows, found), ()) if wide else _fitted(section, rows, found, kappa)
    blocks = [_wrapped(title(section)), body]
    if kappa and not wide:
        blocks.append(_invariants(section))
    if not kappa and not wide:
        blocks.append(_layers_table(section))
    if not kappa:
        blocks.append("\n".join(_wrapped(said, hang=2) for said in sentences(verdicts(section))))
        blocks.append("\n".join(_wrapped(f"! {w}", hang=2) for w in warnings(section)))
    left_out = [f"Not in {WIDTH} columns: {' and '.join(gone)}; `leansurgeon report --wide` shows all."] if gone else []
    blocks.append("\n".join(_wrapped(n, hang=2) for n in [*left_out, *notes(section, kappa)]))
    return "\n\n".join(filter(None, blocks))


def _fitted(section: Section, rows: Sequence[Any], found: list[Column], kappa: bool) -> tuple[str, list[str]]:
    """The table in 80 columns and the heads of what it had to leave out.

    At need it goes without the shape, gives parameters in millions, breaks names over several lines, and leaves out
    time, then memory.
    """
    body = _grid(rows, found)
    for short in () if kappa else (False, True):
        if _width(body) > WIDTH:
            found = without_gaps([c for c in columns(section, short=short) if c.key != "layers_heads"], rows)
            body = _grid(rows, found)
    gone: list[str] = []
    longest = max((len(found[0].cell(row)) for row in rows), default=0)
    for key in (None, "step_ms", "memory"):
        if _width(body) > WIDTH:
            gone += [one_line(c.head) for c in found if c.key == key]
            found = [c for c in found if c.key != key]
            over = _width(_grid(rows, found)) - WIDTH
            body = _grid(rows, found, name_width=max(SHORTEST_NAME, longest - over) if over > 0 else None)
    return body, gone


def _grid(rows: Sequence[Any], found: Sequence[Column], name_width: int | None = None) -> str:
    """Head, rule and rows. The head goes in as rows, since tabulate pads real heads by two more blanks a column."""
    heads = [_two_lines(column.head).split("\n") for column in found]
    tall = max(map(len, heads))
    lines = [list(line) for line in zip(*([""] * (tall - len(h)) + h for h in heads), strict=True)]
    cells = [[column.cell(row) for column in found] for row in rows]
    _run_names_down(cells, name_width, together=bool(rows) and isinstance(rows[0], tuple))
    across = zip(*lines, *cells, strict=True)
    rule = ["-" * max(len(part) for cell in column for part in cell.split("\n")) for column in across]
    return _plain([*lines, rule, *cells], left=sum(column.left for column in found))


def _run_names_down(cells: list[list[str]], width: int | None, together: bool) -> None:
    """Break the names in the first column at `width`; with `together` (layers), lines of one name share its pieces."""
    start = 0
    while start < len(cells):
        name, end = cells[start][0], start + 1
        while together and end < len(cells) and cells[end][0] == name:
            end += 1
        pieces = textwrap.wrap(name, width) if width else [name]
        for i in range(start, end):
            cells[i][0] = (pieces.pop(0) if pieces else "") if i < end - 1 else "\n".join(pieces)
        start = end


def _invariants(section: Section) -> str:
    """The second table of `--kappa`: what depends on the basis of the heads beside what does not."""
    rows, found = layer_rows(section), without_gaps(invariant_columns(section), layer_rows(section))
    return _fitted(section, rows, found, True)[0] if len(found) > len(SHARED) else ""


def _plain(lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """Cells in columns, two blanks between them; the first `left` columns are flush left."""
    align = ["left"] * left + ["right"] * (len(lines[0]) - left)
    body = tabulate(lines, tablefmt="plain", disable_numparse=True, colalign=align)
    return "\n".join(line.rstrip() for line in body.splitlines())


def _chosen(section: Section, wide: bool, kappa: bool) -> tuple[Sequence[Any], list[Column]]:
    if kappa:
        rows, extra = layer_rows(section), invariant_columns(section)[len(SHARED) :] if wide else []
        return rows, without_gaps([*layer_columns(section), *extra], rows)
    return section.rows, without_gaps(columns(section, wide=wide), section.rows)


def _layers_table(section: Section) -> str:
    """Kappa of equal layers side by side, where models of different depth would otherwise be compared by an average."""
    known = [row for row in section.rows if row.kappa and row.kappa.layers]
    depths = {len(row.kappa.layers) for row in known}
    if section.kind == "models" or len(depths) < 2:
        return ""
    deepest = max(depths)
    steps = min(deepest, LAYERS_SHOWN)
    shown = sorted({round(i * (deepest - 1) / (steps - 1)) for i in range(steps)})

    def cell(row: Row, i: int) -> str:
        return bound_cell(row.kappa.layers[i].median) if i < len(row.kappa.layers) else ""

    cells = [["\n".join(textwrap.wrap(row.name, 32)), *(cell(row, i) for i in shown)] for row in known]
    while True:
        body = _plain([["kappa of layer", *(str(i + 1) for i in shown)], *cells])
        if _width(body) <= WIDTH or len(shown) < 3:
            return body
        drop = len(shown) // 2
        shown.pop(drop)
        for line in cells:
            line.pop(drop + 1)


def _markup(rows: Sequence[Any], found: Sequence[Column], style: str) -> str:
    return tabulate(
        [[column.cell(row) for column in found] for row in rows],
        headers=[one_line(column.head) for column in found],
        tablefmt=style,
        disable_numparse=True,
        colalign=["left" if column.left else "right" for column in found],
    )


def one_line(head: str) -> str:
    return head.replace("-\n", "-").replace("/\n", "/").replace("\n", " ")


def _two_lines(head: str) -> str:
    """A long metric name broken at its middle blank; a one-line head stands on the rule."""
    if "\n" not in head and len(head) > 12 and " " in head:
        blanks = [i for i, c in enumerate(head) if c == " "]
        middle = min(blanks, key=lambda i: abs(i - len(head) / 2))
        head = f"{head[:middle]}\n{head[middle + 1 :]}"
    return head


def _width(body: str) -> int:
    return max(map(len, body.splitlines()), default=0)


def _wrapped(line: str, hang: int = 0) -> str:
    return textwrap.fill(line, WIDTH, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False)


# -- files ----------------------------------------------------------------------------------------


def _beside(section: Section, wide: bool, kappa: bool) -> tuple[Sequence[Any], list[Column]]:
    """What a document has room for: the default columns, and rank and centred value beside kappa."""
    rows, found = _chosen(section, wide, kappa)
    return rows, found if wide or kappa else [*found, *without_gaps(rank_columns(), rows)]


def _markdown(section: Section, wide: bool, kappa: bool) -> str:
    rows, found = _beside(section, wide, kappa)
    safe = [Column(c.key, c.head, lambda r, c=c: c.cell(r).replace("|", "\\|"), c.raw, c.left) for c in found]
    lines = sentences(verdicts(section)) + [f"**{w}**" for w in warnings(section)] + notes(section, kappa)
    return f"### {title(section)}\n\n{_markup(rows, safe, 'pipe')}\n\n" + "\n".join(f"- {line}" for line in lines)


def _latex(section: Section, wide: bool, kappa: bool) -> str:
    """A booktabs tabular; needs `\\usepackage{booktabs}`. What must be said beside it stands in comments."""
    rows, found = _beside(section, wide, kappa)
    body = _markup(rows, found, "latex_booktabs")
    for sign, command in (("±", r"$\pm$"), ("≥", r"$\ge$"), ("…", r"\dots{}"), (NONE, "--")):
        body = body.replace(sign, command)
    body = re.sub(r"(?<=\s)-(?=\d)", "$-$", body)
    said = [title(section), *sentences(verdicts(section)), *warnings(section), *notes(section, kappa)]
    return "\n".join([f"% {said[0]}", body, *(f"% {line}" for line in said[1:])])


def _csv(found: Sequence[Section], kappa: bool) -> str:
    """All columns of all sections in one file, numbers as they are, one header."""
    tables = []
    for section in found:
        chosen = _chosen(section, True, kappa)[1]
        task = section.task
        start = {"section": section.name, "task": task and task.name, "metric_name": task and task.metric}
        for row in layer_rows(section) if kappa else section.rows:
            line = start | {column.key: column.raw(row) for column in chosen}
            if not kappa:
                line["metric_sd"] = row.metric.sd if row.metric else None
                line["memory_kind"] = row.memory_kind
                line["paths"] = " ".join(row.paths)
            tables.append(line)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(key for line in tables for key in line)), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: "" if v in (None, NONE) else v for k, v in line.items()} for line in tables)
    return out.getvalue().rstrip("\n")


# -- json -----------------------------------------------------------------------------------------


def document(found: Sequence[Section], problems: Sequence[str] = ()) -> dict[str, Any]:
    """Everything that is known, as one JSON-able dict with `schema_version`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "sections": [
            {
                "kind": section.kind,
                "name": section.name,
                "task": section.task.__dict__ if section.task else None,
                "rows": [row_dict(row) for row in section.rows],
                "verdicts": [v.as_dict() for v in verdicts(section)],
                "warnings": warnings(section),
                "notes": notes(section),
            }
            for section in found
        ],
        "problems": list(problems),
    }


def row_dict(row: Row) -> dict[str, Any]:
    """One row for a program; shapes as in the table, kappa with every layer."""
    out: dict[str, Any] = {"name": row.name, "role": row.role, "control_of": row.control_of, "seeds": list(row.seeds)}
    for key in ("metric", "best", "before", "test", "test_last", "loss", "memory", "step_ms", "throughput", "seconds"):
        value = getattr(row, key)
        out[key] = value.as_dict() if value else None
    known = row.parameters and row.reference_parameters
    return out | {
        "parameters": row.parameters,
        "reference_parameters": row.reference_parameters,
        "change": row.parameters / row.reference_parameters - 1 if known else None,
        "parts": row.parts,
        "shape": row.shape,
        "memory_kind": row.memory_kind or None,
        "throughput_unit": row.throughput_unit or None,
        "device": row.device or None,
        "precision": row.precision or None,
        "init": row.init or None,
        "epochs": row.epochs,
        "inherited_epochs": row.inherited,
        "seeds_still_improving": row.still_falling,
        "kappa": as_dict(row.kappa),
        "paths": list(row.paths),
        "scores": row.scores and {task: score.as_dict() for task, score in row.scores.items()},
        "mean_of_scores": mean_of(row).mean if mean_of(row) else None,
    }
