"""The test split, where a task publishes one: read once, when the training is over, and nothing is chosen by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from leansurgeon.errors import plural
from leansurgeon.training.evaluate import evaluate
from leansurgeon.training.runs import folder as runfolder
from leansurgeon.training.runs.summary import OnTest, Scores
from leansurgeon.training.update.step import Scored

if TYPE_CHECKING:
    from leansurgeon.training.state import Run

SPLIT = "test"


def is_wanted(run: Run) -> bool:
    """Whether the task publishes a test split, and the recipe wants it read."""
    return SPLIT in run.task.splits and run.recipe.train.eval.test


def at_end(run: Run, check: Callable[[], None] = lambda: None) -> OnTest | None:
    """What the summary holds under `test`: samples, and loss and metric of the `last` weights and of the `best`, those
    that the evaluation split chose. None where the task has no such split or the recipe wants none of it.

    `check` is called before every batch and may raise. To be called by all processes, when the best and the last model
    are written.
    """
    if not is_wanted(run):
        return None
    last = _measured(run, run.judged, check)
    result = OnTest(run.task.size(SPLIT), last, last)
    best = run.history.best
    if best is not None and best.step != run.history.done:
        kept = run.recipe.train.checkpoint.keep_best
        result = replace(result, best=_measured(run, _best(run), check) if kept else None)
    chosen, metric = result.best or last, run.task.metric
    shown = f"{100 * chosen.metric:.2f} %" if metric.percent else f"{chosen.metric:.4g}"
    which = "best by validation" if result.best else "last step"
    run.progress.say(f"test split, {plural(result.samples, 'sample')}: {metric.label} {shown} ({which})")
    if run.main:
        run.note(type="test", step=run.history.done, **result.as_dict(), metric_key=metric.key)
    return result


def _measured(run: Run, scored: Scored, check: Callable[[], None]) -> Scores:
    train, accelerator = run.recipe.train, run.trainer.accelerator
    options = {"batch": train.eval.batch, "check": check, "workers": train.workers}
    return evaluate(scored, run.task, accelerator, split=SPLIT, **options).scores()


def _best(run: Run) -> Scored:
    """The best model, read back from the run folder."""
    from leansurgeon import checkpoints

    torch.manual_seed(run.recipe.train.seed)
    loaded = checkpoints.load(run.folder / runfolder.BEST, run.task.head, run.task.model_overrides())
    train = run.recipe.train
    scored = Scored(loaded, run.task, precision=train.precision, sparse_prediction=train.sparse_prediction)
    return scored.to(run.trainer.accelerator.device)
