"""GLUE as the paper's Table 1 prints it: a row per pretrained model, a column per task, and the mean of all eight.

Each task is judged by the metric that its run recorded: accuracy, but F1 for MRPC and QQP, Pearson's correlation for
STS-B and Matthews' for CoLA (MNLI: the matched part). Runs belong together when they started from the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from leansurgeon.report.evidence.run import Run
from leansurgeon.report.humans import listed, spread
from leansurgeon.report.rows.rows import GLUE, Note, Row, Section, metric
from leansurgeon.training.runs.summary import DONE


def section(runs: Sequence[Run]) -> Section | None:
    """The table over all finished runs of task `glue` among these, newest first; None where there are none."""
    models: dict[tuple, list[Run]] = {}
    for run in runs:
        if run.glue_task in GLUE and run.summary.status == DONE:
            models.setdefault(_start(run), []).append(run)
    rows = [_row(_name(group[0]), group) for group in models.values()]
    if not rows:
        return None
    missing = [row.name for row in rows if len(row.scores or {}) < len(GLUE)]
    said = [
        "MNLI matched, SST-2, RTE, QNLI: accuracy; QQP, MRPC: F1; STS-B: Pearson's, CoLA: Matthews' correlation; all "
        "times 100, on the development sets, after the last step, as means over seeds.",
    ]
    if missing:
        said.append(f"A mean is said of all eight tasks only; some are missing of {listed(missing)}.")
    notes = tuple(Note(line, "quality") for line in said)
    return Section("glue", "GLUE", None, tuple(sorted(rows, key=lambda row: row.name)), notes)


def _row(name: str, runs: list[Run]) -> Row:
    """Of every task and seed the newest run."""
    newest: dict[str, dict[int | None, Run]] = {}
    for run in runs:
        newest.setdefault(run.glue_task, {}).setdefault(run.summary.seed, run)
    scores = {task: spread(_score(run) for run in seeds.values()) for task, seeds in newest.items()}
    used = [run for seeds in newest.values() for run in seeds.values()]
    known = {task: score for task, score in scores.items() if score}
    return Row(name, "run", shape=used[0].shape, scores=known, runs=tuple(used))  # what holds for all tasks together


def _score(run: Run) -> float | None:
    last, best = metric(run.summary.final), metric(run.summary.best)
    return best if last is None else last


def _start(run: Run) -> tuple:
    """What tells pretrained models apart: the arm of an experiment, or the digests of the weights that a run took."""
    if run.part and run.part.arm:
        return (run.part.name, _name(run))
    weights = sorted(f"{k}={v}" for k, v in run.summary.model.start.files.items() if k.endswith(".safetensors"))
    return (_name(run), *weights)


def _name(run: Run) -> str:
    return (run.part.arm if run.part else "") or run.summary.model.start.name or run.summary.model.source or "?"
