"""What `heads` and `bench` leave in the folder of a run, as a report needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from leansurgeon.checkpoints.recorded.part import Part
from leansurgeon.reading.jsonfile import Json, value_at
from leansurgeon.reading.values import items, number, objects, text, whole


@dataclass(frozen=True)
class AttentionHeads:
    """The heads of one layer; `importance` has a number for each, None where it was not measured."""

    kind: str
    stage: int
    layer: int  # from 0
    importance: tuple[float | None, ...]


@dataclass(frozen=True)
class Off:
    """A point of a pruning curve: the score with this share of heads switched off."""

    fraction: float
    score: float


@dataclass(frozen=True)
class HeadStudy:
    """Importance of heads, and how the score falls as they go, by the order in which they do. `score` is the name of
    what the curves show: "accuracy" or "loss".
    """

    attentions: tuple[AttentionHeads, ...]
    samples: int | None
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
        judged_by=text(document.get("judged_by")),
        score=score,
        orders={name: tuple(filter(None, (off(point, score) for point in points))) for name, points in orders.items()},
    )


def off(point: dict[str, Any], score: str) -> Off | None:
    """One point of the curve of heads switched off; None without a fraction or a score."""
    fraction, value = number(point.get("fraction")), number(point.get(score))
    return None if fraction is None or value is None else Off(fraction, value)


@dataclass(frozen=True)
class Quartiles(Part):
    """A figure over rounds, and (of one against another) what it says."""

    median: float | None = None
    verdict: str = ""


@dataclass(frozen=True)
class BenchRow(Part):
    """One shape under one attention backend; times in seconds."""

    name: str = "?"
    backend: str = ""
    seconds: Mapping[str, Quartiles] = field(default_factory=dict)
    training_per_second: float | None = None
    forward_per_second: float | None = None
    peak_memory: float | None = None
    step_against_first: Quartiles = Quartiles()

    def time(self, key: str) -> float | None:
        """The median of a measured time."""
        return self.seconds[key].median if key in self.seconds else None


@dataclass(frozen=True)
class Load(Part):
    """What was timed."""

    batch: float | None = None
    tokens: float | None = None
    rounds: float | None = None
    precision: str = "?"


@dataclass(frozen=True)
class Bench(Part):
    """The document of `leansurgeon bench`."""

    rows: tuple[BenchRow, ...] = ()
    load: Load = Load()
    unit: str = "samples"
    device: str = "?"
    peak_memory_kind: str = ""
    skipped: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def bench_of(document: Json) -> Bench | None:
    """The document of `leansurgeon bench`; None where it has no rows."""
    bench = Bench.from_dict(document) if isinstance(document, dict) else Bench()
    return bench if bench.rows else None
