"""Model cards of what a training leaves: the card of the model that it began with, and what the training measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from leansurgeon.checkpoints import record
from leansurgeon.checkpoints.places import without_places
from leansurgeon.checkpoints.publish.card import Measured, Metric, Training, write_card
from leansurgeon.training.runs import folder as runfolder
from leansurgeon.training.runs.summary import Scores, Summary, own_test


def cards(run_dir: Path, start: Path, made: Summary, split: Mapping[str, str]) -> None:
    """Write README.md into the best and the last model of a run, and into their records what they were trained on, a
    task with this `split`; `start` is the folder that the training began with.
    """
    for name, scores in ((runfolder.BEST, made.best or made.final), (runfolder.LAST, made.final)):
        folder = run_dir / name
        if (folder / "config.json").is_file():
            surgery = record.read_if_whole(folder)
            if surgery:
                surgery = record.write(folder, replace(surgery, fitted=(*surgery.fitted, split)))
            write_card(folder, surgery, called(run_dir, made), start, training(made, scores))


def called(run_dir: Path, made: Summary) -> str:
    """The run's name; of an arm, whose folder has the number of its seed alone, experiment, arm and seed."""
    part = made.experiment
    return f"{part.name}-{part.arm}-s{part.seed}" if part and part.name else run_dir.resolve().name


def training(made: Summary, scores: Scores | None) -> Training:
    """The figures of these weights, and how they came about."""
    task = made.task
    data = str(without_places(task.data.get("source") or task.name))
    measured, before, count = (
        [Measured(f"{data}, evaluation", metrics_of(made, scores))],
        made.before,
        task.eval_samples,
    )
    if own_test(made):  # the figures of what chose nothing
        scores, before, count = made.test.best or made.test.last, made.test.before, made.test.samples
        measured = [Measured(f"{data}, held out", metrics_of(made, scores))]
    elif made.test and made.test.best and made.test.best.metric is not None:
        metric = Metric(task.metric, task.metric_label, made.test.best.metric)
        measured.append(Measured(f"{data}, published test split", (metric,)))
    how = f"{made.steps:,} steps" if made.steps is not None else "steps of an unknown number"
    how += f" ({made.epochs:.3g} epochs)" if made.epochs is not None else ""
    says = [f"Trained for {how} on {data} with seed {made.seed}."]
    first, after = before and before.metric, scores and scores.metric
    if after is not None:
        was = f" before and {task.shown(after)} after" if first is not None else ""
        of = f" of {count:,} {'held-out ' if own_test(made) else ''}samples" if count else ""
        says.append(f"{task.metric_label}: {task.shown(first if first is not None else after)}{was}{of}.")
    return Training(tuple(measured), tuple(says))


def metrics_of(made: Summary, scores: Scores | None) -> tuple[Metric, ...]:
    """The figures that are known: the metric, macro F1 where one class has most samples, and the loss."""
    task = made.task
    known = [(task.metric, task.metric_label, scores and scores.metric)]
    known += [("f1", "macro F1", scores.metrics["macro_f1"])] if scores and scores.largest_class else []
    known += [("loss", "loss", scores and scores.loss)] if task.metric != "loss" else []
    return tuple(Metric(*one) for one in known if one[-1] is not None)
