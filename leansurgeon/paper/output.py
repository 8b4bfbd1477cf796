"""Format the audit for a reader, in 80 columns (a table per exhibit, and notes on what does not fit), or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from leansurgeon.paper.audit import UNITS, AuditedRow, Exhibit
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.words import in_columns, wrap

CLAIM = (
    "No table shows whether more heads or a lower kappa make the difference. `leansurgeon run claim-retrieval` tests "
    "them separately; results so far are in examples/results/claim.md of the repository."
)
COUNTED = ["", "layers", "heads", "head_dim", "MLP", "paper", "counted", "off by"]


def render(exhibits: Exhibits) -> str:
    """Format every exhibit and a closing summary."""
    blocks = []
    for exhibit, rows in exhibits:
        unit = "M" if any(a.parameters >= 10_000_000 for a in rows) else "k"  # unit of an exhibit's changes
        blocks.append(f"{exhibit.name}: {exhibit.title}")
        blocks += [in_columns(COUNTED, list(map(count_cells, rows)))] if rows else []
        if made := [saving_cells(exhibit, a, unit) for a in rows if a.row.role != "original"]:
            saving = ["", "all", "paper", "depth", "heads", "MLP", exhibit.headline, "GB"]
            kept = [i for i in range(len(saving)) if i == 0 or any(line[i].strip() for line in made)]
            heads, *cells = ([line[i] for i in kept] for line in (saving, *made))
            blocks += [f"Change against the original, and where it comes from ({unit})", in_columns(heads, cells)]
        blocks.append("\n".join(lines_below(exhibit, rows)))
    return "\n\n".join(filter(None, [*blocks, "\n".join(wrap(closing(exhibits))), "\n".join(wrap(CLAIM))]))


# -- tables ---------------------------------------------------------------------------------------


def count_cells(a: AuditedRow) -> list[str]:
    """Return shape, head policy (`64` for an original, else `keep 64` or `split 32`), the printed figure and ours."""
    row, shape = a.row, a.shape
    starred = {
        key: "*" if getattr(row.printed, key) not in (None, getattr(row.words, key)) else ""
        for key in ("layers", "heads", "mlp_dim")
    }
    sizes = {stage.head_dim for stage in shape.stages}
    number = str(*sizes) if len(sizes) == 1 else ""  # left out if stages differ
    mlp = shape.column("mlp_dim")
    if len(shape.stages) > 1:  # in multiples of the width, if stages differ
        ratios = {stage.mlp_dim / stage.width for stage in shape.stages}
        mlp = f"{ratios.pop():g}x" if len(ratios) == 1 else "mixed"
    off = "" if a.difference_percent is None else per_cent(a.difference_percent, 2)
    return [
        {"original": row.model, "lean": "  lean"}.get(row.role, ""),
        shape.column("depth") + starred["layers"],
        shape.column("heads") + starred["heads"],
        number if row.role == "original" else f"{row.policy} {number}".rstrip(),
        mlp + starred["mlp_dim"],
        row.figure or "",
        f"{a.parameters:,}",
        off + (" !" if is_missed(a) else "  " if off else ""),
    ]


def saving_cells(exhibit: Exhibit, a: AuditedRow, unit: str) -> list[str]:
    """Return where the change in parameters comes from, and what the paper says it costs."""
    first, now = exhibit.original(a.row), a.row
    digits = 2 if unit == "M" else 1
    parts = [-a.saved_by[part] for part in ("depth", "heads", "mlp")]
    return [
        label(exhibit, a),
        per_cent(a.change_percent),
        now.change or "",
        *(f"{value / UNITS[unit]:+.{digits}f}" if value else "0" for value in parts),
        arrow(first.scores.get(exhibit.headline), now.scores.get(exhibit.headline)),
        arrow(first.memory, now.memory),
    ]


def label(exhibit: Exhibit, a: AuditedRow) -> str:
    """Return the model's name; for a variant in a figure, what distinguishes it."""
    if not exhibit.key.startswith("fig"):
        return a.row.model
    words = a.row.printed
    same_heads = len({r.printed.heads for r in exhibit.rows}) == 1
    return f"{words.layers} x " + (f"MLP {words.mlp_dim}" if same_heads else f"{words.heads} heads")


def per_cent(value: float, digits: int = 1) -> str:
    """Format a percentage, such as `-53.7 %`; no sign before a zero."""
    text = f"{value:+.{digits}f}"
    return f"{text if float(text) else text[1:]} %"


def arrow(before: float | None, after: float | None) -> str:
    """Return before and after, if both are known."""
    return "" if before is None or after is None else f"{before} -> {after}"


# -- words ----------------------------------------------------------------------------------------


def lines_below(exhibit: Exhibit, rows: list[AuditedRow]) -> list[str]:
    """Return the legend, the rows' remarks (one line if several models share it), and the exhibit's remarks."""
    lines = []
    if any(a.row.reading for a in rows):
        lines += wrap("* not what the paper prints, but what gives its figure; see below")
    if any(is_missed(a) for a in rows):
        lines += wrap("! does not round to the paper's figure")
    if any(a.row.scores or a.row.memory for a in rows if a.row.role != "original"):
        own = [exhibit.headline] * any(a.row.scores for a in rows)
        own += ["memory (GB, all GPUs together)"] * any(a.row.memory for a in rows)
        lines += wrap(f"The paper's own, not measured here: {' and '.join(own)}.")
    said = {}
    for a in rows:
        if a.remark:
            said.setdefault(a.remark, []).append(name(exhibit, a))
    for remark, names in said.items():
        lines += wrap(f"- {' and '.join(names)}: {remark}", "  ")
    for remark in exhibit.remarks:
        lines += wrap(f"- {remark}", "  ")
    return lines


def closing(exhibits: Exhibits) -> str:
    """Summarize how many printed figures our counts match, and by how much they miss the others."""
    rows = [a for _, rows in exhibits for a in rows]
    total = summary(rows)
    printed, reached = total["rows"] - total["unprinted"], total["rounds"] + total["truncates"]
    if not printed:
        return ""
    cut = f" ({total['truncates']} is truncated there, not rounded)" if total["truncates"] else ""
    text = f"Reached: {reached} of {printed} printed figures{cut}, {total['as_printed']} by the row as it is printed."
    misses = [f"{name(e, a)} {per_cent(a.difference_percent, 2)}" for e, rows in exhibits for a in rows if is_missed(a)]
    return text + (f" Not reached: {', '.join(misses)}." if misses else "")


def is_missed(a: AuditedRow) -> bool:
    """Return whether our count is not the printed one."""
    return a.agreement == "differs"


def name(exhibit: Exhibit, a: AuditedRow) -> str:
    """Return a row's name for use in a sentence."""
    return label(exhibit, a) if a.row.role == "variant" else f"{a.row.model} {a.row.role}"


SCHEMA_VERSION = 1
PAPER = "Saratchandran, Teney, Lucey: Leaner Transformers: More Heads, Less Depth"
Exhibits = Sequence[tuple[Exhibit, list[AuditedRow]]]


def document(exhibits: Exhibits) -> JsonObject:
    """Return everything known about every row."""
    return {
        "schema_version": SCHEMA_VERSION,
        "paper": PAPER,
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


def summary(rows: Sequence[AuditedRow]) -> dict[str, int]:
    """Count how many figures are matched, and how; `as_printed` counts matches without a changed row."""
    kinds = [a.agreement for a in rows]
    return {
        "rows": len(rows),
        **{kind: kinds.count(kind) for kind in ("rounds", "truncates", "differs", "unprinted")},
        "as_printed": sum(a.agreement in ("rounds", "truncates") and a.as_printed is None for a in rows),
    }


def record(a: AuditedRow) -> JsonObject:
    """Return a row for JSON."""
    row = a.row
    return {
        "model": row.model,
        "role": row.role,
        "preset": row.preset,
        "printed": asdict(row.printed)
        | {"parameters": row.figure, "parameters_number": row.count, "change": row.change}
        | {"scores": dict(row.scores), "memory_gb": row.memory},
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
