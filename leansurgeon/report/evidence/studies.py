"""What `heads` and `bench` leave in the folder of a run, as a report needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from leansurgeon.checkpoints.recorded.part import Part
from leansurgeon.reading.jsonfile import Json


@dataclass(frozen=True)
class AttentionHeads(Part):
    """The heads of one layer, with a number for each."""

    kind: str = "self"
    stage: int = 0
    layer: int = 0  # from 0
    importance: tuple[float, ...] = ()


@dataclass(frozen=True)
class Off(Part):
    """A point of a pruning curve: the score with this share of heads switched off."""

    fraction: float | None = None
    accuracy: float | None = None
    loss: float | None = None


@dataclass(frozen=True)
class Curve(Part):
    """How the score falls as heads go, by the order in which they do."""

    orders: Mapping[str, tuple[Off, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class HeadStudy(Part):
    """The document of `leansurgeon heads`: importance of heads, and what their absence costs."""

    attentions: tuple[AttentionHeads, ...] = ()
    samples: Mapping[str, int] = field(default_factory=dict)
    curve: Curve = Curve()

    @property
    def score(self) -> str:
        """What the curves show: "accuracy" or "loss"."""
        return "accuracy" if any(p.accuracy is not None for p in self.curve.orders.get("importance", ())) else "loss"


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


def heads_of(document: Json) -> HeadStudy | None:
    """The document of `leansurgeon heads`; None where it is none."""
    return HeadStudy.from_dict(document) if isinstance(document, dict) else None


def bench_of(document: Json) -> Bench | None:
    """The document of `leansurgeon bench`; None where it has no rows."""
    bench = Bench.from_dict(document) if isinstance(document, dict) else Bench()
    return bench if bench.rows else None
