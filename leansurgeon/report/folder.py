"""What lies in the folder of a run or model beside the record that `collect` has read: curves, recipe, and what other
commands left. Everything here may be absent, odd or cut off; then it is None, and the report goes on without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leansurgeon.errors import UsageError
from leansurgeon.reading import files, jsonfile
from leansurgeon.report.collect import Entry
from leansurgeon.report.humans import number
from leansurgeon.training.runs.folder import EXPERIMENT, METRICS, RECIPE

HEADS, BENCH = "heads.json", "bench.json"  # what `heads` and `bench` leave
POINTS = 240  # of a curve at most: more than a drawing of 360 units can show
LARGEST = 64 * 2**20  # bytes that are read of one file

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Curve:
    """Training of one seed: (epoch, value) of the training loss, of the task's metric, and of the evaluation's loss."""

    seed: int | None
    loss: Points
    metric: Points
    eval_loss: Points


def curve(entry: Entry) -> Curve | None:
    """The curves in `metrics.jsonl`; None where nothing of it can be drawn.

    An evaluation is written with its step only; its epoch follows from the epochs and steps of the summary.
    """
    epochs, steps = (number(entry.data.get(key)) for key in ("epochs", "steps"))
    content = text_of(entry.path / METRICS)
    if content is None or not epochs or not steps:
        return None
    found: dict[str, list[tuple[float, float]]] = {"loss": [], "metric": [], "eval_loss": []}
    for line in content.splitlines():
        record = parsed(line)
        step = number(record.get("step")) if isinstance(record, dict) else None
        if step is None:
            continue
        kind = record.get("type")
        wanted = {"train": (("loss", "loss"),), "eval": (("metric", "metric"), ("eval_loss", "loss"))}.get(kind, ())
        for key, name in wanted:
            value = number(record.get(name))
            if value is not None:
                found[key].append((step * epochs / steps, value))
    made = Curve(entry.data.get("seed"), *(thinned(found[key]) for key in ("loss", "metric", "eval_loss")))
    return made if made.loss or made.metric else None


def thinned(points: list[tuple[float, float]]) -> Points:
    """At most `POINTS` of them at equal spacing, the first and the last among them."""
    n = len(points)
    if n <= POINTS:
        return tuple(points)
    return tuple(points[round(i * (n - 1) / (POINTS - 1))] for i in range(POINTS))


def left_by(entry: Entry, name: str) -> dict[str, Any] | None:
    """The JSON object that another command wrote into this folder, such as `heads.json`."""
    found = parsed(text_of(entry.path / name) or "")
    return found if isinstance(found, dict) else None


def recipe_text(entry: Entry) -> str | None:
    """The resolved recipe of a run."""
    return text_of(entry.path / RECIPE) if entry.kind == "run" else None


def experiment_recipe(entry: Entry) -> Path | None:
    """The resolved recipe of the whole experiment, which `run` leaves beside the runs of its arms."""
    path = entry.path.parent / EXPERIMENT
    return path if entry.kind == "run" and entry.path != Path() and path.is_file() else None


def text_of(path: Path) -> str | None:
    try:
        return files.read_text(path, LARGEST)
    except UsageError:
        return None


def parsed(content: str) -> Any:
    try:
        return jsonfile.parse(content, "")
    except UsageError:
        return None
