"""Format sections: for a terminal (80 columns by default), as Markdown, LaTeX, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby

from tabulate import tabulate

from leansurgeon.errors import UsageError, did_you_mean
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.report.collect import Unfinished
from leansurgeon.report.humans import NONE
from leansurgeon.report.kappa import as_dict
from leansurgeon.report.notes import notes, title
from leansurgeon.report.rows import Section
from leansurgeon.report.tables.columns import (
    INVARIANTS,
    RANKS,
    Column,
    TableRow,
    define_columns,
    define_layer_columns,
    lay_out,
    list_layers,
    pick,
    pick_columns,
    show,
    without_gaps,
)
from leansurgeon.report.verdict import conclude, expectations, verdicts, warnings
from leansurgeon.words import WIDTH, harmless, in_markdown, wrap

FORMATS = ("table", "markdown", "csv", "json", "latex")
SCHEMA_VERSION = 1
LAYERS_SHOWN = 10
SHORTEST_NAME = 10
SIGNS = {"±": r"$\pm$", "≥": r"$\ge$", "…": r"\dots{}", NONE: "--"}
# The keys of a row's JSON object.
ROW = (
    "name", "role", "control_of", "seeds", "metric", "macro_f1", "best", "before", "test", "test_last", "loss",
    "size", "inference_memory", "latency", "batch_latency", "memory", "step_ms", "throughput", "seconds", "parameters",
    "reference_parameters", "change", "parts", "shape",
    "memory_kind", "throughput_unit", "device", "precision", "init", "epochs", "inherited_epochs",
    "seeds_still_improving", "kappa", "paths", "scores", "mean_of_scores",
)  # fmt: skip


def check_format(format: str) -> None:
    """Raise `UsageError` for a format that is not in `FORMATS`."""
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
    """Return the sections in one of `FORMATS`, followed by `unfinished` runs; only JSON includes `problems`.

    `wide` shows all columns, `kappa` one row per layer instead. Raises `UsageError` for another format.
    """
    check_format(format)
    if kappa:
        sections = [s for s in sections if list_layers(s)]
        if not sections:
            raise UsageError(
                "None of these runs measured kappa.",
                "`leansurgeon kappa RUN` measures it; or put `measure: {kappa: {}}` into the recipe.",
            )
    if format == "json":
        document = make_document(sections, problems, unfinished)
        return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    if format == "csv":
        return render_csv(sections, kappa)
    write, end = {
        "table": (render_terminal, list_unfinished),
        "markdown": (render_markdown, list_unfinished_in_markdown),
        "latex": (render_latex, lambda runs: "\n".join(f"% {one.sentence} {one.resume}".rstrip() for one in runs)),
    }[format]
    return "\n\n".join([write(s, wide, kappa) for s in sections] + ([end(unfinished)] if unfinished else []))


# -- documents ------------------------------------------------------------------------------------


def draw_markup(
    section: Section, wide: bool, kappa: bool, style: str, written: Callable[[str], str] = str
) -> tuple[str, list[str]]:
    """Return the table in a style of `tabulate`, and the text that belongs to it: verdicts, warnings, notes.

    There is room for the rank and the centred value beside kappa. `written` escapes text for the format.
    """
    rows, columns = lay_out(section, wide, kappa)
    if not (wide or kappa):
        columns = [*columns, *without_gaps(pick(define_columns(section), RANKS), rows)]
    body = tabulate(
        [[written(column.cell(row)) for column in columns] for row in rows],
        headers=[column.title for column in columns],
        tablefmt=style,
        disable_numparse=True,
        colalign=["left" if column.left else "right" for column in columns],
    )
    warned = [written(said) for said in warnings(section)]
    warned = [f"**{said}**" for said in warned] if style == "pipe" else warned
    found = conclude(section)
    return body, [*map(written, found), *warned, *(written(note.says) for note in notes(section, kappa))]


def render_markdown(section: Section, wide: bool, kappa: bool) -> str:
    """Return a section in Markdown: its table, verdicts, warnings and notes, with all text escaped."""
    body, said = draw_markup(section, wide, kappa, "pipe", in_markdown)
    return f"### {in_markdown(title(section))}\n\n{body}\n\n" + "\n".join(f"- {line}" for line in said)


def render_latex(section: Section, wide: bool, kappa: bool) -> str:
    """Return a booktabs tabular; needs `\\usepackage{booktabs}`. Verdicts, warnings and notes are comments."""
    body, said = draw_markup(section, wide, kappa, "latex_booktabs")
    for sign, command in SIGNS.items():
        body = body.replace(sign, command)
    body = re.sub(r"(?<=\s)-(?=\d)", "$-$", body)
    return "\n".join([f"% {title(section)}", body, *(f"% {line}" for line in said)])


def render_csv(sections: Sequence[Section], kappa: bool) -> str:
    """Return all columns of all sections as one CSV file with one header, numbers unrounded."""
    lines = []
    for section in sections:
        rows, columns = lay_out(section, True, kappa)
        task = section.task
        start = {"section": section.name, "task": task and task.name, "metric_name": task and task.metric}
        for row in rows:
            line = start | {column.key: column.raw(row) for column in columns}
            if not kappa:
                line["metric_sd"] = row.metric.sd if row.metric else None
                line |= {"memory_kind": row.memory_kind, "paths": " ".join(row.paths)}
            lines.append(line)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(key for line in lines for key in line)), lineterminator="\n")
    writer.writeheader()
    for line in lines:
        writer.writerow({key: None if value == NONE else harmless(value) for key, value in line.items()})
    return out.getvalue().rstrip("\n")


def list_unfinished_in_markdown(runs: Sequence[Unfinished]) -> str:
    """Return the unfinished runs."""
    calls = [f" `` {one.resume} ``" if one.resume and not one.running else "" for one in runs]
    lines = (f"- {in_markdown(one.sentence)}{call}" for one, call in zip(runs, calls, strict=True))
    return "### Interrupted\n\n" + "\n".join(lines)


def make_document(
    sections: Sequence[Section], problems: Sequence[str] = (), unfinished: Sequence[Unfinished] = ()
) -> JsonObject:
    """Return everything known as one JSON-able dict with `schema_version`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "sections": [
            {
                "kind": section.kind,
                "name": section.name,
                "task": section.task.__dict__ if section.task else None,
                # An empty string means unknown.
                "rows": [
                    {key: None if (value := getattr(row, key)) == "" else as_dict(value) for key in ROW}
                    for row in section.rows
                ],
                "verdicts": list(map(asdict, verdicts(section))),
                "warnings": warnings(section),
                "expected": list(map(asdict, expectations(section))),
                "notes": [note.says for note in notes(section)],
            }
            for section in sections
        ],
        "unfinished": [one.as_dict() for one in unfinished],
        "problems": list(problems),
    }


# -- terminal -------------------------------------------------------------------------------------


def render_terminal(section: Section, wide: bool, kappa: bool) -> str:
    """Return the verdict, the table, and how its numbers were measured."""
    body, gone = draw_table(section, wide, kappa)
    found = [*conclude(section), *(f"! {warning}" for warning in warnings(section))]
    more = "" if wide or kappa else tabulate_layers(section)
    if kappa and not wide:  # beside kappa, what depends on the basis of the heads and what does not
        rows = list_layers(section)
        shown = without_gaps(pick(define_layer_columns(section), INVARIANTS), rows)
        more = fit(rows, shown)[0] if len(shown) > 3 else ""
    left_out = [f"Not in {WIDTH} columns: {' and '.join(gone)}; `leansurgeon report --wide` shows all."] if gone else []
    said = sorted(notes(section, kappa), key=lambda note: not note.caveat)  # caveats first
    below = [*left_out, *(note.says for note in said)]
    blocks = ["\n".join(wrap(title(section))), "" if kappa else hang(found), body, more, hang(below)]
    return "\n\n".join(filter(None, blocks))


def draw_table(section: Section, wide: bool = False, kappa: bool = False) -> tuple[str, list[str]]:
    """Return the table alone, and the heads of the columns that did not fit."""
    rows, shown = lay_out(section, wide, kappa)
    for short in () if wide or kappa else (False, True):  # if needed, drop the shape, then show parameters in millions
        if measure(draw_grid(rows, shown)) > WIDTH:
            shown = without_gaps([c for c in pick_columns(section, short=short) if c.key != "layers_heads"], rows)
    return (draw_grid(rows, shown), []) if wide else fit(rows, shown, ("step_ms", "memory"))


def list_unfinished(runs: Sequence[Unfinished]) -> str:
    """Return the unfinished runs; the command to resume is shown once for all runs that share it."""
    lines = []
    for resume, several in groupby(runs, key=lambda one: "" if one.running else one.resume):
        lines += [line for one in several for line in wrap(one.sentence)]
        lines += [f"  {resume}"] if resume else []  # never wrapped, since it is meant to be copied
    return "\n".join(lines)


def hang(lines: Sequence[str]) -> str:
    """Join sentences, with continuation lines indented."""
    return "\n".join(line for said in lines for line in wrap(said, "  "))


def fit(rows: Sequence[TableRow], shown: list[Column], spare: Sequence[str] = ()) -> tuple[str, list[str]]:
    """Return the table in 80 columns and the heads of dropped columns: if needed, wrap names over several lines, then
    drop the `spare` columns one by one.
    """
    body, gone = draw_grid(rows, shown), []
    longest = max((len(shown[0].cell(row)) for row in rows), default=0)
    for key in (None, *spare):
        if measure(body) > WIDTH:
            gone += [c.title for c in shown if c.key == key]
            shown = [c for c in shown if c.key != key]
            over = measure(draw_grid(rows, shown)) - WIDTH
            body = draw_grid(rows, shown, name_width=max(SHORTEST_NAME, longest - over) if over > 0 else None)
    return body, gone


def draw_grid(rows: Sequence[TableRow], shown: Sequence[Column], name_width: int | None = None) -> str:
    """Return head, rule and rows; names are wrapped at `name_width`, and lines of the same name (layers) share its
    pieces. The head is part of the rows, since tabulate pads real heads by two more spaces per column.
    """
    heads = [break_head(column.head).split("\n") for column in shown]
    tall = max(map(len, heads))
    lines = [list(line) for line in zip(*([""] * (tall - len(h)) + h for h in heads), strict=True)]
    cells = [[column.cell(row) for column in shown] for row in rows]
    together = bool(rows) and isinstance(rows[0], tuple)
    for _, several in groupby(enumerate(cells), key=lambda item: (item[1][0], None if together else item[0])):
        group = [line for _, line in several]
        pieces = textwrap.wrap(group[0][0], name_width) if name_width else [group[0][0]]
        for line in group[:-1]:
            line[0] = pieces.pop(0) if pieces else ""
        group[-1][0] = "\n".join(pieces)
    across = zip(*lines, *cells, strict=True)
    rule = ["-" * max(len(part) for cell in column for part in cell.split("\n")) for column in across]
    return draw_plain([*lines, rule, *cells], left=sum(column.left for column in shown))


def draw_plain(lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return cells in columns, with two spaces between them; the first `left` columns are aligned left."""
    align = ["left"] * left + ["right"] * (len(lines[0]) - left)
    body = tabulate(lines, tablefmt="plain", disable_numparse=True, colalign=align)
    return "\n".join(line.rstrip() for line in body.splitlines())


def tabulate_layers(section: Section) -> str:
    """Return a table of kappa at the same layer numbers, if models of different depth would otherwise be compared by an
    average.
    """
    known = [row for row in section.rows if row.kappa and row.kappa.layers]
    depths = {len(row.kappa.layers) for row in known}
    if section.kind == "models" or len(depths) < 2:
        return ""
    deepest = max(depths)
    steps = min(deepest, LAYERS_SHOWN)
    shown = sorted({round(i * (deepest - 1) / (steps - 1)) for i in range(steps)})
    while True:
        lines = [["kappa of layer", *(str(i + 1) for i in shown)]]
        for row in known:
            cells = [show(row.kappa.layers[i].median) if i < len(row.kappa.layers) else "" for i in shown]
            lines.append(["\n".join(textwrap.wrap(row.name, 32)), *cells])
        body = draw_plain(lines)
        if measure(body) <= WIDTH or len(shown) < 3:
            return body
        del shown[len(shown) // 2]


def break_head(head: str) -> str:
    """Return a long metric name broken at its middle space; a one-line head stays."""
    if "\n" in head or len(head) <= 12 or " " not in head:
        return head
    middle = min((i for i, c in enumerate(head) if c == " "), key=lambda i: abs(i - len(head) / 2))
    return f"{head[:middle]}\n{head[middle + 1 :]}"


def measure(body: str) -> int:
    """Return the width of a text."""
    return max(map(len, body.splitlines()), default=0)
