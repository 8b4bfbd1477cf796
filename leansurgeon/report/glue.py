"""GLUE as the paper's Table 1 prints it: a row per pretrained model, a column per task, and the mean of all eight.

Each task is judged by the metric that its run recorded: accuracy, but F1 for MRPC and QQP, Pearson's correlation for
STS-B and Matthews' for CoLA (MNLI: the matched part). Runs belong together when they started from the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from leansurgeon.report.collect import Entry
from leansurgeon.report.humans import Spread, listed, number, part, spread, text
from leansurgeon.report.rows import Row, Section, make_row

NAMES = {
    "mnli": "MNLI",
    "sst2": "SST-2",
    "stsb": "STS-B",
    "rte": "RTE",
    "qnli": "QNLI",
    "qqp": "QQP",
    "mrpc": "MRPC",
    "cola": "CoLA",
}


def section(entries: Sequence[Entry]) -> Section | None:
    """The table over all finished runs of task `glue` among these, newest first; None where there are none."""
    models: dict[tuple, list[Entry]] = {}
    for entry in sorted(entries, key=lambda e: -e.when):
        if entry.kind == "run" and _task(entry) and entry.data.get("status", "done") == "done":
            models.setdefault(_start(entry), []).append(entry)
    rows = [_row(_name(group[0]), group) for group in models.values()]
    if not rows:
        return None
    missing = [row.name for row in rows if len(row.scores or {}) < len(NAMES)]
    notes = [
        "MNLI matched, SST-2, RTE, QNLI: accuracy; QQP, MRPC: F1; STS-B: Pearson's, CoLA: Matthews' correlation; all "
        "times 100, on the development sets, after the last step, as means over seeds.",
    ]
    if missing:
        notes.append(f"A mean is said of all eight tasks only; some are missing of {listed(missing)}.")
    return Section("glue", "GLUE", None, tuple(sorted(rows, key=lambda row: row.name)), tuple(notes))


def mean_of(row: Row) -> Spread | None:
    """Mean of the eight tasks' means; None while one is missing."""
    scores = row.scores or {}
    return Spread(sum(s.mean for s in scores.values()) / len(NAMES), None, 1) if len(scores) == len(NAMES) else None


def _row(name: str, entries: list[Entry]) -> Row:
    """Of every task and seed the newest run."""
    newest: dict[str, dict] = {}
    for entry in entries:
        newest.setdefault(_task(entry), {}).setdefault(entry.data.get("seed"), entry)
    scores = {task: spread(_score(entry) for entry in runs.values()) for task, runs in newest.items()}
    used = [entry for runs in newest.values() for entry in runs.values()]
    row = make_row(name, "run", used)
    known = {task: score for task, score in scores.items() if score}
    # Of what `make_row` brings only what holds for all tasks together.
    return Row(name, "run", shape=row.shape, scores=known, paths=row.paths)


def _task(entry: Entry) -> str | None:
    """Which of the eight tasks was trained; None for another task."""
    found = part(entry.data, "task", "data", "task")
    return found if entry.data["task"].get("name") == "glue" and found in NAMES else None


def _score(entry: Entry) -> float | None:
    found = part(entry.data, "final", "metric")
    return number(found if found is not None else part(entry.data, "best", "metric"))


def _start(entry: Entry) -> tuple:
    """What tells pretrained models apart: the arm of an experiment, or the digests of the weights that a run took."""
    if text(part(entry.data, "experiment", "arm")):
        return (text(part(entry.data, "experiment", "name")), _name(entry))
    files = part(entry.data, "model", "start", "files")
    weights = sorted(f"{k}={v}" for k, v in files.items() if k.endswith(".safetensors")) if files else []
    return (_name(entry), *weights)


def _name(entry: Entry) -> str:
    arm = text(part(entry.data, "experiment", "arm"))
    start = text(part(entry.data, "model", "start", "name"))
    return arm or start or text(part(entry.data, "model", "source"), "?")
