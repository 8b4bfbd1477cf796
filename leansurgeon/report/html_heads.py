"""Importance of heads as a map, and the score as heads go, from what `leansurgeon heads` left with a run."""

from __future__ import annotations

from typing import Any

from leansurgeon.report import folder, svg
from leansurgeon.report.html import Markup, tag
from leansurgeon.report.html_results import Entries, entries_of
from leansurgeon.report.humans import number, part, text, whole
from leansurgeon.report.rows import Section

KINDS = {"self": "self-attention", "encoder": "encoder", "decoder": "decoder", "cross": "cross-attention"}
ORDERS = {"importance": "least important first", "random": "random order", "oracle": "by single ablations"}


def head_maps(section: Section, entries: Entries) -> Markup | None:
    """Maps for every row whose folder holds `heads.json`, of its first seed that has one."""
    charts = []
    for row in section.rows:
        for entry in entries_of(row, entries):
            found = folder.left_by(entry, folder.HEADS)
            if found:
                seed = f", seed {entry.data['seed']}" if isinstance(entry.data.get("seed"), int) else ""
                charts += [*maps(f"{row.name}{seed}", found), off_curve(f"{row.name}{seed}", found)]
                break
    charts = [chart for chart in charts if chart]
    return tag("div", charts, class_="charts") if charts else None


def maps(name: str, found: dict[str, Any]) -> list[Markup]:
    """A map for every kind of attention of a model (encoder, decoder, cross), its layers from top to bottom."""
    kinds: dict[str, list[tuple[str, list[float | None]]]] = {}
    attentions = [a for a in listed(found.get("attentions")) if isinstance(a, dict)]
    stages = len({a.get("stage") for a in attentions})
    for a in attentions:
        layer = str((whole(a.get("layer")) or 0) + 1)
        row = [number(v) for v in listed(a.get("importance"))]
        if row:
            kind = text(a.get("kind"), "self")
            called = f"{(whole(a.get('stage')) or 0) + 1}.{layer}" if stages > 1 and kind == "self" else layer
            kinds.setdefault(kind, []).append((called, row))
    samples, reduction = (
        whole(part(found, "samples", "importance")),
        text(part(found, "options", "reduction"), "sample"),
    )
    says = (
        f"Mean slope of the loss by each head's gate, absolute per {reduction} (Michel et al. 2019); fuller is larger."
    )
    says += f" {samples:,} samples." if samples else ""
    return [
        svg.cell_map(rows, f"{name}: {KINDS.get(kind, kind)}", says, "head", "layer") for kind, rows in kinds.items()
    ]


def listed(value: Any) -> list:
    return value if isinstance(value, list) else []


def off_curve(name: str, found: dict[str, Any]) -> Markup | None:
    """Accuracy, or loss where there is none, as more and more heads are switched off."""
    orders = part(found, "curve", "orders")
    if not isinstance(orders, dict):
        return None
    rows = {key: [r for r in listed(orders.get(key)) if isinstance(r, dict)] for key in ORDERS}
    key = "accuracy" if any(number(r.get("accuracy")) is not None for r in rows["importance"]) else "loss"
    lines = [
        svg.Series(ORDERS[order], points_of(found_rows, key), i) for i, (order, found_rows) in enumerate(rows.items())
    ]
    percent = (lambda v: f"{round(100 * v, 2):g} %") if key == "accuracy" else svg.plain_small
    return svg.chart(
        lines,
        f"{name}: heads switched off",
        "On held-out samples, without retraining.",
        x_label="share of heads off",
        y_label=key,
        x_format=lambda v: f"{100 * v:g} %",
        y_format=percent,
    )


def points_of(rows: list[dict[str, Any]], key: str) -> svg.Points:
    known = [(number(row.get("fraction")), number(row.get(key))) for row in rows]
    return tuple((a, b) for a, b in known if a is not None and b is not None)
