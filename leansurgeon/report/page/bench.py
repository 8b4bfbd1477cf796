"""Speed and memory apart from a training, from what `leansurgeon bench` left in the folder of a run."""

from __future__ import annotations

from leansurgeon.report import humans
from leansurgeon.report.evidence.studies import Bench, BenchRow
from leansurgeon.report.humans import NONE
from leansurgeon.report.page.blocks import Block, Cell, cell, table, words
from leansurgeon.report.rows.rows import Section


def benches(section: Section) -> list[Block]:
    """One table for every row whose folder holds `bench.json`, of its first seed that has one."""
    made: list[Block] = []
    for row in section.rows:
        measured = next((run.bench for run in row.runs if run.bench), None)
        made += bench(row.name, measured) if measured else []
    return made


def bench(name: str, measured: Bench) -> list[Block]:
    """Step, latency, throughput and peak memory of a model's shapes and attention backends, and what was remarked."""
    heads = ["", "backend", "step, ms", "forward of one sample, ms", "forward of a batch, ms"]
    heads += [f"training, {measured.unit}/s", f"forward, {measured.unit}/s", "peak", "step against the first"]
    load = measured.load
    says = f"{name}: batch {load.batch or '?'}"
    says += f" of {load.tokens:,} tokens" if load.tokens and measured.unit == "tokens" else ""
    says += f", {load.precision}, on {measured.device}"
    says += f"; medians of {f'{load.rounds:,} ' if load.rounds else ''}interleaved rounds, new weights"
    rows = [cells(row, first=i == 0) for i, row in enumerate(measured.rows)]
    peak = [f"Peak: {measured.peak_memory_kind}."] if measured.peak_memory_kind else []
    return [table(says, heads, rows), *words(peak, "quiet"), *words((*measured.skipped, *measured.remarks))]


def cells(row: BenchRow, *, first: bool) -> list[Cell]:
    """One row of the table of speeds: times in ms, samples per second, memory, and the verdict on the first row."""
    times = [None if (t := row.time(key)) is None else 1000 * t for key in ("step", "forward_1", "forward")]
    plain = [*times, row.training_per_second, row.forward_per_second]
    against = row.step_against_first
    verdict = (
        "" if first else {"same": "not told apart"}.get(against.verdict, against.verdict)
    )  # no sameness: rounds disagree
    return [
        cell(row.name),
        cell(row.backend or NONE),
        *(cell(humans.plain(value), value) for value in plain),
        cell(humans.memory(row.peak_memory), row.peak_memory),
        cell(humans.plain(against.median), against.median, f"({verdict})" if verdict else ""),
    ]
