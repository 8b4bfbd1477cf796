"""Sections as documents: Markdown, LaTeX, CSV and JSON."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from tabulate import tabulate

from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.report.evidence.collect import Unfinished
from leansurgeon.report.evidence.kappa import as_dict
from leansurgeon.report.humans import NONE
from leansurgeon.report.notes import notes, title
from leansurgeon.report.rows.expected import expectations
from leansurgeon.report.rows.glue import mean_of
from leansurgeon.report.rows.rows import Row, Section
from leansurgeon.report.tables.columns import Column, chosen, layer_rows, one_line, rank_columns, without_gaps
from leansurgeon.report.verdict import sentences, verdicts, warnings
from leansurgeon.words import harmless, in_markdown

SCHEMA_VERSION = 1


def _markup(rows: Sequence[Any], columns: Sequence[Column], style: str) -> str:
    return tabulate(
        [[column.cell(row) for column in columns] for row in rows],
        headers=[one_line(column.head) for column in columns],
        tablefmt=style,
        disable_numparse=True,
        colalign=["left" if column.left else "right" for column in columns],
    )


def _beside(section: Section, wide: bool, kappa: bool) -> tuple[Sequence[Any], list[Column]]:
    """What a document has room for: the default columns, and rank and centred value beside kappa."""
    rows, columns = chosen(section, wide, kappa)
    return rows, columns if wide or kappa else [*columns, *without_gaps(rank_columns(), rows)]


def markdown(section: Section, wide: bool, kappa: bool) -> str:
    """A section in Markdown: verdicts, warnings, notes and its table; what is written there shows as it is."""
    rows, columns = _beside(section, wide, kappa)
    safe = [replace(c, show=lambda value, c=c: in_markdown(c.show(value))) for c in columns]
    lines = said_beside(section, kappa, "**{}**", in_markdown)
    head = f"### {in_markdown(title(section))}"
    return f"{head}\n\n{_markup(rows, safe, 'pipe')}\n\n" + "\n".join(f"- {line}" for line in lines)


def latex(section: Section, wide: bool, kappa: bool) -> str:
    """A booktabs tabular; needs `\\usepackage{booktabs}`. What must be said beside it stands in comments."""
    rows, columns = _beside(section, wide, kappa)
    body = _markup(rows, columns, "latex_booktabs")
    for sign, command in (("±", r"$\pm$"), ("≥", r"$\ge$"), ("…", r"\dots{}"), (NONE, "--")):
        body = body.replace(sign, command)
    body = re.sub(r"(?<=\s)-(?=\d)", "$-$", body)
    return "\n".join([f"% {title(section)}", body, *(f"% {line}" for line in said_beside(section, kappa))])


def said_beside(section: Section, kappa: bool, warning: str = "{}", written: Callable[[str], str] = str) -> list[str]:
    """What must be said beside a section's table: verdicts, warnings (in this form), notes, each as it is `written`."""
    warned = [warning.format(written(said)) for said in warnings(section)]
    found = map(written, sentences(verdicts(section)))
    return [*found, *warned, *(written(note.says) for note in notes(section, kappa))]


def as_csv(sections: Sequence[Section], kappa: bool) -> str:
    """All columns of all sections in one file, numbers as they are, one header."""
    tables = []
    for section in sections:
        shown = chosen(section, True, kappa)[1]
        task = section.task
        start = {"section": section.name, "task": task and task.name, "metric_name": task and task.metric}
        for row in layer_rows(section) if kappa else section.rows:
            line = start | {column.key: column.raw(row) for column in shown}
            if not kappa:
                line["metric_sd"] = row.metric.sd if row.metric else None
                line["memory_kind"] = row.memory_kind
                line["paths"] = " ".join(row.paths)
            tables.append(line)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(key for line in tables for key in line)), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: "" if v in (None, NONE) else harmless(v) for k, v in line.items()} for line in tables)
    return out.getvalue().rstrip("\n")


def unfinished(runs: Sequence[Unfinished]) -> str:
    """Markdown of what has not come to its end."""
    calls = [f" `` {one.resume} ``" if one.resume and not one.running else "" for one in runs]
    lines = (f"- {in_markdown(one.sentence)}{call}" for one, call in zip(runs, calls, strict=True))
    return "### Interrupted\n\n" + "\n".join(lines)


def comments(runs: Sequence[Unfinished]) -> str:
    """Lines of LaTeX comment on the runs that are not finished."""
    return "\n".join(f"% {one.sentence} {one.resume}".rstrip() for one in runs)


# -- json -----------------------------------------------------------------------------------------


def document(
    sections: Sequence[Section], problems: Sequence[str] = (), unfinished: Sequence[Unfinished] = ()
) -> JsonObject:
    """Everything that is known, as one JSON-able dict with `schema_version`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "sections": [
            {
                "kind": section.kind,
                "name": section.name,
                "task": section.task.__dict__ if section.task else None,
                "rows": [row_dict(row) for row in section.rows],
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


SPREADS = (
    "metric", "macro_f1", "best", "before", "test", "test_last", "loss", "memory", "step_ms", "throughput", "seconds",
)  # fmt: skip


def row_dict(row: Row) -> JsonObject:
    """One row for a program; shapes as in the table, kappa with every layer."""
    out: dict[str, Any] = {"name": row.name, "role": row.role, "control_of": row.control_of, "seeds": list(row.seeds)}
    for key in SPREADS:
        value = getattr(row, key)
        out[key] = value and asdict(value)
    out |= {key: getattr(row, key) for key in ("parameters", "reference_parameters", "change", "parts", "shape")}
    words = ("memory_kind", "throughput_unit", "device", "precision", "init")
    out |= {key: getattr(row, key) or None for key in words}
    return out | {
        "epochs": row.epochs,
        "inherited_epochs": row.inherited,
        "seeds_still_improving": row.still_falling,
        "kappa": as_dict(row.kappa),
        "paths": list(row.paths),
        "scores": row.scores and {task: asdict(score) for task, score in row.scores.items()},
        "mean_of_scores": mean_of(row).mean if mean_of(row) else None,
    }
