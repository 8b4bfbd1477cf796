"""What lies in the folder of a run or model beside its record: curves, recipe, and what other commands left.

Everything here may be absent, odd or cut off; then it is None, and the report goes on without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from leansurgeon.errors import UsageError
from leansurgeon.reading import files, jsonfile
from leansurgeon.reading.jsonfile import JsonObject, value_at
from leansurgeon.reading.values import number
from leansurgeon.training.runs.folder import BEST, EXPERIMENT, LAST, METRICS, call_in

HEADS, BENCH = "heads.json", "bench.json"  # what `heads` and `bench` leave
POINTS = 240  # of a curve at most: more than a drawing of 360 units can show
LARGEST = 64 * 2**20  # bytes that are read of one file

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Curve:
    """Training of one seed: (epoch, value) of the training loss, and of the task's metric on the evaluation data."""

    seed: int | None
    loss: Points
    metric: Points


@dataclass(frozen=True)
class ExperimentFile:
    """The resolved recipe of a whole experiment, and the command that it came from ("" where nobody noted it)."""

    path: Path
    text: str
    call: str


def called(path: Path) -> str:
    """What a person calls a run or model: its folder's name, and never that of the `model/` or `last/` inside a run."""
    whole = path.absolute()
    parts = [part for part in whole.parts if part not in (".", whole.anchor)]
    if ".." in parts:
        parts = list(whole.resolve().parts[1:])
    while len(parts) > 1 and parts[-1] in (BEST, LAST):
        parts.pop()
    return parts[-1] if parts else str(path)


def curve(run: Path, seed: int | None, epochs: float | None, steps: float | None) -> Curve | None:
    """The curves in `metrics.jsonl`; None where nothing of it can be drawn.

    An evaluation is written with its step only; its epoch follows from the epochs and steps of the summary.
    """
    if not epochs or not steps:
        return None
    loss, metric = [], []
    for step, record in logged(run):
        for kind, key, points in (("train", "loss", loss), ("eval", "metric", metric)):
            value = number(record.get(key))
            if record.get("type") == kind and value is not None:
                points.append((step * epochs / steps, value))
    return Curve(seed, thinned(loss), thinned(metric)) if loss or metric else None


def logged(run: Path, *, newest_first: bool = False) -> Iterator[tuple[float, JsonObject]]:
    """The lines of a run's metrics that name a step, with it."""
    lines = (text_of(run / METRICS) or "").splitlines()
    for line in reversed(lines) if newest_first else lines:
        try:
            record = jsonfile.parse(line, "")
        except UsageError:  # cut off
            continue
        step = number(value_at(record, "step"))
        if step is not None:
            yield step, record


def thinned(points: list[tuple[float, float]]) -> Points:
    """At most `POINTS` of them: the least and the largest of every stretch, so that no peak is lost, and both ends."""
    if len(points) <= POINTS:
        return tuple(points)
    stretches, inner = POINTS // 2 - 1, points[1:-1]
    kept = {0, len(points) - 1}
    for i in range(stretches):
        stretch = range(i * len(inner) // stretches, (i + 1) * len(inner) // stretches)
        kept |= {1 + min(stretch, key=lambda j: inner[j][1]), 1 + max(stretch, key=lambda j: inner[j][1])}
    return tuple(points[i] for i in sorted(kept))


def experiment_file(run: Path) -> ExperimentFile | None:
    """The experiment's file beside the run's folder, with the call it records; None without a readable one."""
    path = run.parent / EXPERIMENT
    content = text_of(path) if run != Path() and path.is_file() else None
    return ExperimentFile(path, content, call_in(content)) if content is not None else None


def text_of(path: Path) -> str | None:
    """A file's text; None where it is too large, unreadable or no text."""
    try:
        return files.read_text(path, LARGEST)
    except UsageError:
        return None
