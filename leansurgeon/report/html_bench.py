"""Speed and memory apart from a training, from what `leansurgeon bench` left in the folder of a run."""

from __future__ import annotations

from typing import Any

from leansurgeon.report import folder, humans
from leansurgeon.report.html import Child, Markup, data, join, prose, table, tag
from leansurgeon.report.html_results import Entries, entries_of
from leansurgeon.report.humans import NONE, number, part, text
from leansurgeon.report.rows import Section

LATENCY = (("step", "step"), ("forward_1", "forward of one sample"), ("forward", "forward of a batch"))


def benches(section: Section, entries: Entries) -> Markup | None:
    """One table for every row whose folder holds `bench.json`, of its first seed that has one."""
    made = []
    for row in section.rows:
        found = next((b for e in entries_of(row, entries) if (b := folder.left_by(e, folder.BENCH))), None)
        made.append(bench(row.name, found) if found else None)
    return join(made) if any(made) else None


def bench(name: str, found: dict[str, Any]) -> Markup | None:
    """Step, latency, throughput and peak memory of a model's shapes and attention backends, and what was remarked."""
    rows = [row for row in as_list(found.get("rows")) if isinstance(row, dict)]
    if not rows:
        return None
    unit, load = text(found.get("unit"), "samples"), found.get("load")
    heads = [
        "",
        "backend",
        *(f"{shown}, ms" for _, shown in LATENCY),
        f"training, {unit}/s",
        f"forward, {unit}/s",
        "peak",
    ]
    tokens, rounds = (number(part(load, key)) for key in ("tokens", "rounds"))
    says = f"{name}: batch {number(part(load, 'batch')) or '?'}"
    says += f" of {tokens:,} tokens" if tokens and unit == "tokens" else ""
    says += f", {text(part(load, 'precision'), '?')}, on {text(found.get('device'), '?')}"
    says += f"; medians of {f'{rounds:,} ' if rounds else ''}interleaved rounds, new weights"
    kind = text(found.get("peak_memory_kind"))
    remarks = [text(said) for key in ("skipped", "remarks") for said in as_list(found.get(key)) if text(said)]
    return join(
        table(says, [*heads, "step against the first"], [cells(row, first=row is rows[0]) for row in rows]),
        tag("p", f"Peak: {kind}.", class_="quiet") if kind else None,
        prose(remarks),
    )


def cells(row: dict[str, Any], *, first: bool) -> list[Child]:
    def figure(value: float | None, shown: str) -> Markup:
        return data(shown if value is not None else NONE, value)

    times = [number(part(row, "seconds", key, "median")) for key, _ in LATENCY]
    rates = [number(row.get(key)) for key in ("training_per_second", "forward_per_second")]
    peak, ratio = number(row.get("peak_memory")), number(part(row, "step_against_first", "median"))
    verdict = "" if first else text(part(row, "step_against_first", "verdict"))
    verdict = {"same": "not told apart"}.get(verdict, verdict)  # the rounds do not agree; that is no sameness
    return [
        text(row.get("name"), "?"),
        text(row.get("backend"), NONE),
        *(figure(None if t is None else 1000 * t, humans.plain(None if t is None else 1000 * t)) for t in times),
        *(figure(rate, humans.plain(rate)) for rate in rates),
        figure(peak, humans.memory(peak)),
        join(figure(ratio, humans.plain(ratio)), f" ({verdict})" if verdict else None),
    ]


def as_list(value: Any) -> list:
    return value if isinstance(value, list) else []
