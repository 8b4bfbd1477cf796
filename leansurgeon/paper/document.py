"""The audit for programs: one JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from leansurgeon.paper.audit import Audited
from leansurgeon.paper.base import Exhibit
from leansurgeon.reading.jsonfile import JsonObject

SCHEMA_VERSION = 1
PAPER = "Saratchandran, Teney, Lucey: Leaner Transformers: More Heads, Less Depth"
Exhibits = Sequence[tuple[Exhibit, list[Audited]]]


def document(exhibits: Exhibits, how: str) -> JsonObject:
    """Everything that is known of every row. `how` is meta or formula."""
    return {
        "schema_version": SCHEMA_VERSION,
        "paper": PAPER,
        "count": how,
        "summary": summary([a for _, rows in exhibits for a in rows]),
        "exhibits": [
            {
                "key": exhibit.key,
                "name": exhibit.name,
                "title": exhibit.title,
                "remarks": list(exhibit.remarks),
                "rows": [record(a) for a in rows],
            }
            for exhibit, rows in exhibits
        ],
    }


def summary(rows: Sequence[Audited]) -> dict[str, int]:
    """How many counts fit the printed figure, and how; `as_printed` of them without changing a word of the row."""
    kinds = [a.agreement for a in rows]
    return {
        "rows": len(rows),
        **{kind: kinds.count(kind) for kind in ("rounds", "truncates", "differs", "unprinted")},
        "as_printed": sum(a.agreement in ("rounds", "truncates") and a.as_printed is None for a in rows),
    }


def record(a: Audited) -> JsonObject:
    """A row as JSON holds it."""
    row, printed = a.row, a.row.printed
    return {
        "model": row.model,
        "role": row.role,
        "preset": row.preset,
        "printed": asdict(printed.words)
        | {"parameters": printed.parameters, "parameters_number": printed.count, "change": printed.change}
        | {"scores": dict(printed.scores), "memory_gb": printed.memory},
        "counted": asdict(row.words),
        "counted_as_printed": row.reading is None,
        "head_policy": row.policy,
        "shape": a.shape.as_dict(),
        "parameters": a.parameters,
        "difference": a.difference,
        "difference_percent": a.difference_percent,
        "agreement": a.agreement,
        "parameters_as_printed": a.as_printed,
        "others": dict(a.others),
        "original_parameters": a.original,
        "change_percent": a.change_percent,
        "saved_by": dict(a.saved_by),
        "remark": a.remark or None,
    }
