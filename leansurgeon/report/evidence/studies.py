"""What `heads` and `bench` leave in the folder of a run, as a report needs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from leansurgeon.reading.jsonfile import Json, value_at
from leansurgeon.reading.values import items, number, objects, sentences, text, whole


@dataclass(frozen=True)
class AttentionHeads:
    """The heads of one layer; `importance` has a number for each, None where it was not measured."""

    kind: str
    stage: int
    layer: int  # from 0
    importance: tuple[float | None, ...]


@dataclass(frozen=True)
class Off:
    """A point of a pruning curve: the score with this share of heads switched off, and its range over orders."""

    fraction: float
    score: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class HeadStudy:
    """Importance of heads, and how the score falls as they go, by the order in which they do. `score` is the name of
    what the curves show: "accuracy" or "loss".
    """

    attentions: tuple[AttentionHeads, ...]
    samples: int | None
    reduction: str
    judged_by: str
    score: str
    orders: dict[str, tuple[Off, ...]]

    @property
    def total(self) -> float:
        """The sum of all heads' importance."""
        return sum(v for a in self.attentions for v in a.importance if v is not None and v > 0)


def heads_of(document: Json) -> HeadStudy | None:
    """The document of `leansurgeon heads`; None where it is none."""
    if not isinstance(document, dict):
        return None
    orders = value_at(document, "curve", "orders")
    orders = {text(key): objects(value) for key, value in orders.items()} if isinstance(orders, dict) else {}
    first = orders.get("importance", [])
    score = "accuracy" if any(number(point.get("accuracy")) is not None for point in first) else "loss"
    attentions = [
        AttentionHeads(
            text(a.get("kind"), "self"),
            whole(a.get("stage")) or 0,
            whole(a.get("layer")) or 0,
            tuple(number(v) for v in items(a.get("importance"))),
        )
        for a in objects(document.get("attentions"))
    ]
    return HeadStudy(
        attentions=tuple(a for a in attentions if a.importance),
        samples=whole(value_at(document, "samples", "importance")),
        reduction=text(value_at(document, "options", "reduction"), "sample"),
        judged_by=text(document.get("judged_by")),
        score=score,
        orders={name: tuple(filter(None, (off(point, score) for point in points))) for name, points in orders.items()},
    )


def off(point: dict[str, Any], score: str) -> Off | None:
    """One point of the curve of heads switched off; None without a fraction or a score."""
    fraction, value, low, high = (
        number(point.get(key)) for key in ("fraction", score, f"{score}_low", f"{score}_high")
    )
    return None if fraction is None or value is None else Off(fraction, value, low, high)


@dataclass(frozen=True)
class BenchRow:
    """One shape under one attention backend; times are medians in seconds."""

    name: str
    backend: str
    step: float | None
    forward_of_one: float | None
    forward: float | None
    training_per_second: float | None
    forward_per_second: float | None
    peak_memory: float | None
    step_against_first: float | None
    verdict: str


@dataclass(frozen=True)
class Bench:
    rows: tuple[BenchRow, ...]
    unit: str
    batch: float | None
    tokens: float | None
    rounds: float | None
    precision: str
    device: str
    peak_kind: str
    remarks: tuple[str, ...]


def bench_of(document: Json) -> Bench | None:
    """The document of `leansurgeon bench`; None where it has no rows."""
    rows = objects(value_at(document, "rows"))
    if not rows:
        return None
    load = document.get("load")
    return Bench(
        rows=tuple(map(bench_row, rows)),
        unit=text(document.get("unit"), "samples"),
        batch=number(value_at(load, "batch")),
        tokens=number(value_at(load, "tokens")),
        rounds=number(value_at(load, "rounds")),
        precision=text(value_at(load, "precision"), "?"),
        device=text(document.get("device"), "?"),
        peak_kind=text(document.get("peak_memory_kind")),
        remarks=sentences([*items(document.get("skipped")), *items(document.get("remarks"))]),
    )


def bench_row(row: dict[str, Any]) -> BenchRow:
    """One model's row of `bench.json`; what is missing is None."""

    def seconds(key: str) -> float | None:
        """The median of a measured time, in seconds."""
        return number(value_at(row, "seconds", key, "median"))

    return BenchRow(
        name=text(row.get("name"), "?"),
        backend=text(row.get("backend")),
        step=seconds("step"),
        forward_of_one=seconds("forward_1"),
        forward=seconds("forward"),
        training_per_second=number(row.get("training_per_second")),
        forward_per_second=number(row.get("forward_per_second")),
        peak_memory=number(row.get("peak_memory")),
        step_against_first=number(value_at(row, "step_against_first", "median")),
        verdict=text(value_at(row, "step_against_first", "verdict")),
    )
