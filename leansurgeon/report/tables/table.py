"""Print sections in a terminal (80 columns by default), or as Markdown, CSV, JSON or LaTeX (`tables.documents`)."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from tabulate import tabulate

from leansurgeon.errors import UsageError, did_you_mean
from leansurgeon.report.evidence.collect import Unfinished
from leansurgeon.report.notes import notes, title
from leansurgeon.report.rows.rows import Row, Section
from leansurgeon.report.rows.sections import experiment_section
from leansurgeon.report.tables import documents
from leansurgeon.report.tables.columns import (
    SHARED,
    Column,
    bound_cell,
    chosen,
    columns,
    invariant_columns,
    layer_rows,
    one_line,
    without_gaps,
)
from leansurgeon.report.verdict import sentences, verdicts, warnings
from leansurgeon.training.runs.summary import Summary
from leansurgeon.words import WIDTH, wrap

FORMATS = ("table", "markdown", "csv", "json", "latex")
LAYERS_SHOWN = 10
SHORTEST_NAME = 10


def experiment_table(summaries: Iterable[Summary], format: str = "table") -> str:
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
    sections: Sequence[Section],
    format: str = "table",
    *,
    wide: bool = False,
    kappa: bool = False,
    problems: Sequence[str] = (),
    unfinished: Sequence[Unfinished] = (),
) -> str:
    """Text of the sections in one of `FORMATS`, and what is `unfinished` behind them; only JSON carries `problems`.

    `wide` shows all columns, `kappa` one row per layer instead. Raises `UsageError` for another format.
    """
    check_format(format)
    if kappa:
        sections = [s for s in sections if layer_rows(s)]
        if not sections:
            raise UsageError(
                "None of these runs measured kappa.",
                "`leansurgeon kappa RUN` measures it; or put `measure: {kappa: {}}` into the recipe.",
            )
    if format == "json":
        document = documents.document(sections, problems, unfinished)
        return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    if format == "csv":
        return documents.as_csv(sections, kappa)
    write = {"table": _terminal, "markdown": documents.markdown, "latex": documents.latex}[format]
    blocks = [write(section, wide, kappa) for section in sections]
    if unfinished:
        blocks.append(
            {"table": _unfinished, "markdown": documents.unfinished, "latex": documents.comments}[format](unfinished)
        )
    return "\n\n".join(blocks)


# -- terminal -------------------------------------------------------------------------------------


def _terminal(section: Section, wide: bool, kappa: bool) -> str:
    """The verdict, the table, and how its numbers came about."""
    rows, shown = chosen(section, wide, kappa)
    body, gone = (_grid(rows, shown), ()) if wide else _fitted(section, rows, shown, kappa)
    blocks = ["\n".join(wrap(title(section)))]
    if not kappa:
        said = [*sentences(verdicts(section)), *(f"! {warning}" for warning in warnings(section))]
        blocks.append(_hanging(said))
    blocks.append(body)
    if kappa and not wide:
        blocks.append(_invariants(section))
    if not kappa and not wide:
        blocks.append(_layers_table(section))
    left_out = [f"Not in {WIDTH} columns: {' and '.join(gone)}; `leansurgeon report --wide` shows all."] if gone else []
    said = sorted(notes(section, kappa), key=lambda note: not note.caveat)  # what may decide comes first
    blocks.append(_hanging([*left_out, *(note.says for note in said)]))
    return "\n\n".join(filter(None, blocks))


def _unfinished(runs: Sequence[Unfinished]) -> str:
    lines = []
    for resume, several in groupby(runs, key=lambda one: "" if one.running else one.resume):
        lines += [line for one in several for line in wrap(one.sentence)]
        lines += [f"  {resume}"] if resume else []  # whole, whatever its length: it is meant to be copied
    return "\n".join(lines)


def _hanging(lines: Sequence[str]) -> str:
    return "\n".join(line for said in lines for line in wrap(said, "  "))


def _fitted(section: Section, rows: Sequence[Any], shown: list[Column], kappa: bool) -> tuple[str, list[str]]:
    """The table in 80 columns and the heads of what it had to leave out.

    At need it goes without the shape, gives parameters in millions, breaks names over several lines, and leaves out
    time, then memory.
    """
    body = _grid(rows, shown)
    for short in () if kappa else (False, True):
        if _width(body) > WIDTH:
            shown = without_gaps([c for c in columns(section, short=short) if c.key != "layers_heads"], rows)
            body = _grid(rows, shown)
    gone: list[str] = []
    longest = max((len(shown[0].cell(row)) for row in rows), default=0)
    for key in (None, "step_ms", "memory"):
        if _width(body) > WIDTH:
            gone += [one_line(c.head) for c in shown if c.key == key]
            shown = [c for c in shown if c.key != key]
            over = _width(_grid(rows, shown)) - WIDTH
            body = _grid(rows, shown, name_width=max(SHORTEST_NAME, longest - over) if over > 0 else None)
    return body, gone


def _grid(rows: Sequence[Any], shown: Sequence[Column], name_width: int | None = None) -> str:
    """Head, rule and rows. The head goes in as rows, since tabulate pads real heads by two more blanks a column."""
    heads = [_two_lines(column.head).split("\n") for column in shown]
    tall = max(map(len, heads))
    lines = [list(line) for line in zip(*([""] * (tall - len(h)) + h for h in heads), strict=True)]
    cells = [[column.cell(row) for column in shown] for row in rows]
    _run_names_down(cells, name_width, together=bool(rows) and isinstance(rows[0], tuple))
    across = zip(*lines, *cells, strict=True)
    rule = ["-" * max(len(part) for cell in column for part in cell.split("\n")) for column in across]
    return _plain([*lines, rule, *cells], left=sum(column.left for column in shown))


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
    rows, shown = layer_rows(section), without_gaps(invariant_columns(section), layer_rows(section))
    return _fitted(section, rows, shown, True)[0] if len(shown) > len(SHARED) else ""


def _plain(lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """Cells in columns, two blanks between them; the first `left` columns are flush left."""
    align = ["left"] * left + ["right"] * (len(lines[0]) - left)
    body = tabulate(lines, tablefmt="plain", disable_numparse=True, colalign=align)
    return "\n".join(line.rstrip() for line in body.splitlines())


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
        """The median of a row's layer `i`, empty beyond its last layer."""
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


def _two_lines(head: str) -> str:
    """A long metric name broken at its middle blank; a one-line head stands on the rule."""
    if "\n" not in head and len(head) > 12 and " " in head:
        blanks = [i for i, c in enumerate(head) if c == " "]
        middle = min(blanks, key=lambda i: abs(i - len(head) / 2))
        head = f"{head[:middle]}\n{head[middle + 1 :]}"
    return head


def _width(body: str) -> int:
    return max(map(len, body.splitlines()), default=0)
