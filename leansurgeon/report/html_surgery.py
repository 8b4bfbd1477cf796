"""Parts of a section that tell what was cut and why, from `surgery.json`: operators, choices, proof, starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from leansurgeon.checkpoints.record import Comparison, DamagedRecord
from leansurgeon.checkpoints.report_numbers import of_comparison, of_source, sentence
from leansurgeon.errors import plural
from leansurgeon.report import humans
from leansurgeon.report.collect import Entry
from leansurgeon.report.columns import Column
from leansurgeon.report.html import Child, Markup, data, join, prose, table, tag
from leansurgeon.report.html_results import Entries, chosen, entries_of, grid
from leansurgeon.report.humans import NONE, listed, number, part, text, whole
from leansurgeon.report.rows import PARTS, Row, Section
from leansurgeon.report.rows import SHAPE as SHAPE_KEYS

SHAPE = (
    ("layers", "depth"),
    ("heads", "heads"),
    ("head_dim", "head_dim"),
    ("key/value heads", "kv_heads"),
    ("MLP", "mlp_dim"),
    ("width", "width"),
)
PARAMETERS = (
    ("embeddings", "embeddings"),
    ("attention", "attention"),
    ("MLP", "mlp"),
    ("rest", "rest"),
    ("all", "total"),
)
SHAPES = ("name", *SHAPE_KEYS, *(f"parameters_{key}" for key in PARTS), "parameters", "change")
CANDIDATES = 6  # that are shown
TWICE = "The sets first compete on a part of the data, the best ones again on all of it; these decide."


def surgery_of(entry: Entry) -> dict[str, Any]:
    """The record of the surgery that led to a run's or a model's weights; empty where there was none."""
    found = entry.data if entry.kind == "model" else part(entry.data, "model", "surgery")
    return found if isinstance(found, dict) and isinstance(found.get("plan"), dict) else {}


def surgeries(section: Section, entries: Entries) -> Markup | None:
    """One block for every row whose shape is not that of its source; the shapes of an experiment in one table."""
    together = section.kind == "experiment"
    made = [cut(row, found, together) for row in section.rows if (found := entries_of(row, entries))]
    if not any(made):
        return None
    shapes = grid("Shape, and parameters by part", section.rows, named(chosen(section, SHAPES))) if together else None
    return join(shapes, made)


def named(found: Sequence[Column]) -> list[Column]:
    """Heads that tell the width of the MLP from its parameters."""
    heads = {"mlp_dim": "MLP width", "parameters": "all params"}
    heads |= {f"parameters_{key}": f"{'MLP' if key == 'mlp' else key} params" for key in PARTS}
    return [replace(column, head=heads.get(column.key, column.head)) for column in found]


def cut(row: Row, found: Sequence[Entry], together: bool) -> Markup | None:
    found = sorted(found, key=lambda e: (not surgery_of(e).get("proof"), whole(e.data.get("seed")) or 0))
    record = surgery_of(found[0])
    steps = record.get("plan") or {}
    if not record or steps.get("before") == steps.get("after"):
        return None
    source = text(part(record, "source", "name")) or text(record.get("source"), "?")
    hashes = part(record, "source", "sha256")
    digests = [f"{text(k)} {text(v)[:16]}…" for k, v in hashes.items()] if isinstance(hashes, dict) else []
    steps_said = [
        join(tag("b", text(o.get("name"))), f" ({text(o.get('exactness'))}): {text(o.get('says'))}")
        for o in as_list(steps.get("operators"))
        if isinstance(o, dict)
    ]
    return tag(
        "section",
        tag("h4", row.name),
        tag(
            "p",
            "From ",
            tag("code", shortened(source)),
            f" (SHA-256 of its weights: {', '.join(digests)})" if digests else None,
            ".",
        ),
        None if together else change_table(row.name, steps),
        tag("p", saving(steps)) if saving(steps) else None,
        prose(steps_said),
        tag("p", f"{text(steps.get('why')).rstrip('.')}.") if text(steps.get("why")) else None,
        choices(record),
        other_seeds(found, steps),
        proof(record),
        compared_starts(row.name, record),
    )


def as_list(value: Any) -> list:
    return value if isinstance(value, list) else []


def shortened(path: str) -> str:
    """The last three parts of a path: who gets the page need not know this machine's folders."""
    parts = path.replace("\\", "/").split("/")
    return path if len(parts) <= 3 else "…/" + "/".join(parts[-3:])


def change_table(name: str, steps: dict[str, Any]) -> Markup:
    """Shape and parameters by part, before and after."""
    rows: list[list[Child]] = []
    sides = [as_list(part(steps, side, "stages")) for side in ("before", "after")]
    for label, key in SHAPE:
        cells = [", ".join(humans.count(whole(part(stage, key))) for stage in stages) or NONE for stages in sides]
        if any(cell.strip(f"{NONE}, ") for cell in cells):
            rows.append([label, *cells, ""])
    for label, key in PARAMETERS:
        old, new = (number(part(steps, f"parameters_{side}", key)) for side in ("before", "after"))
        if old is not None or new is not None:
            changed = "" if old == new else humans.change(new, old) if old else "new"
            cells = [data(humans.count(v), v) for v in (old, new)]
            rows.append([f"parameters, {label}", *cells, changed])
    return table(f"{name}: before and after the cut", ["", "before", "after", "change"], rows, cards=False)


def saving(steps: dict[str, Any]) -> str:
    found = part(steps, "saved_by")
    if not isinstance(found, dict):
        return ""
    known = [f"{text(key)} {-value:+,.0f}" for key, v in found.items() if (value := number(v))]
    order = " (in this order)" if len(known) > 1 else ""
    return f"Change in parameters by {listed(known)}{order}." if known else ""


# -- choices --------------------------------------------------------------------------------------


def choices(record: dict[str, Any]) -> Markup | None:
    """What was decided on sample data: which layers stay, and what the other sets would have cost."""
    decided = record.get("decided")
    if not isinstance(decided, dict) or not decided:
        return None
    used, said = decided.get("calibration"), []
    if isinstance(used, dict):
        said.append(f"Sample data: {text(used.get('says'))}, SHA-256 {text(used.get('sha256'))[:16]}…")
    layers = numbers(decided.get("layers"))
    if layers:
        by = text(decided.get("criterion"))
        said.append(f"Layers kept (from 0): {layers}" + (f", chosen by {by}." if by else "."))
    tensors = whole(decided.get("changed_tensors"))
    if tensors:
        said.append(f"{plural(tensors, 'tensor')} refitted or made anew on the sample data.")
    return join(prose(said), candidates(as_list(decided.get("candidates"))))


def numbers(value: Any) -> str:
    return ", ".join(str(whole(v)) for v in as_list(value) if whole(v) is not None)


def candidates(found: list[Any]) -> Markup | None:
    """The sets of layers that competed, best first; every one after its own refit, judged on guard samples."""
    known = [c for c in found if isinstance(c, dict) and number(c.get("judged_by")) is not None]
    if len(known) < 2:
        return None
    best = sorted(known, key=lambda c: number(c["judged_by"]))[:CANDIDATES]
    rows: list[list[Child]] = [
        [
            text(c.get("criterion")) or NONE,
            numbers(c.get("kept")) or NONE,
            refit(c),
            text(c.get("data")) or NONE,
            data(f"{c['judged_by']:.4g}", c["judged_by"]),
        ]
        for c in best
    ]
    made = table(
        "Sets of layers that were tried, on guard samples (smaller is better)",
        ["chosen by", "layers kept", "refitted", "data", "off by"],
        rows,
        cards=False,
    )
    both = {"part", "all"} <= {text(c.get("data")) for c in known}
    return join(made, tag("p", TWICE, class_="quiet") if both else None)


def refit(candidate: dict[str, Any]) -> str:
    """Which way of healing a candidate had (`surgery.candidates`)."""
    ways = [word for key, word in (("attention", "attention"), ("later", "later layers")) if candidate.get(key) is True]
    return ", ".join(["MLP", *ways])


def other_seeds(found: Sequence[Entry], steps: dict[str, Any]) -> Markup | None:
    """Where seeds kept other layers than the first one, which."""
    said = []
    for entry in found[1:]:
        layers = part(surgery_of(entry), "plan", "layers")
        if isinstance(layers, list) and layers != steps.get("layers"):
            said.append(f"Seed {whole(entry.data.get('seed'))} kept other layers: {numbers(layers)}.")
    return prose(said)


# -- proof ----------------------------------------------------------------------------------------


def proof(record: dict[str, Any]) -> Markup | None:
    found = record.get("proof")
    if not isinstance(found, dict):
        return tag("p", "Proof: not reloaded after writing.", class_="quiet")
    said = (
        f"Proof: reloaded in a fresh process with {text(found.get('loaded_with'), '?')}; "
        f"{humans.count(number(found.get('parameters')))} parameters, no missing and no unexpected tensors."
    )
    compared = found.get("compared")
    return join(tag("p", said), tag("p", compared_said(compared, record)) if isinstance(compared, dict) else None)


def compared_said(compared: dict[str, Any], record: dict[str, Any]) -> str | None:
    try:
        return text(sentence(Comparison.from_dict(compared), language=record.get("language") is True))
    except (DamagedRecord, OverflowError):  # written by another version
        return None


def compared_starts(name: str, record: dict[str, Any]) -> Markup | None:
    """Source, fresh, naive and ours on the same held-out samples (`shrink --compare`), before any training."""
    found, language = record.get("starts"), record.get("language") is True
    if not isinstance(found, dict) or not found:
        return None
    try:
        starts = {key: Comparison.from_dict(value) for key, value in found.items()}
        rows = [of_comparison({"best": "ours"}.get(key, text(key)), start, language) for key, start in starts.items()]
        last = next(reversed(starts.values()))
        if last.loss:
            rows.insert(0, of_source("the source itself", last, language))
    except (DamagedRecord, OverflowError):
        return None
    heads = list(dict.fromkeys(key for row in rows for key in row))
    cells: list[list[Child]] = [[row.get(key, NONE) for key in heads] for row in rows]
    return table(
        f"{name}: starting points before any training, on the same held-out samples", heads, cards=True, rows=cells
    )


GET_STARTS = (
    "A naive start (layers at equal spacing, heads renumbered) beside fresh and ours, on the same held-out samples: "
    "`leansurgeon shrink SOURCE ... --compare`, before the training."
)


def cut_but_not_compared(section: Section, entries: Entries) -> bool:
    """Whether something was cut from trained weights here, and nowhere compared with a fresh and a naive start."""
    records = [surgery_of(entry) for row in section.rows for entry in entries_of(row, entries)]
    kept = [r for r in records if r.get("initialised") == "transfer"]
    return bool(kept) and not any(r.get("starts") for r in records)
