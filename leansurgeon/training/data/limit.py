"""Tasks that show a part of their data: the first of it for a quick look at a recipe (`--limit-batches`), or a fixed
choice of the evaluation split where there is no time for all of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from leansurgeon.tasks import Task
from leansurgeon.tasks.base import Batch, Description
from leansurgeon.training.recipe.settings import Train


class Instead:
    """Stands for a task: whatever a class below does not change is the task itself."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __getattr__(self, name: str) -> Any:
        if "_task" not in self.__dict__:  # while a worker process takes it out of its pickle
            raise AttributeError(name)
        return getattr(self._task, name)


class Limited(Instead):
    """Shows the first samples of each split only."""

    def __init__(self, task: Task, train: int, evaluation: int) -> None:
        super().__init__(task)
        self._most = {"train": train, "eval": evaluation, "test": evaluation}

    def size(self, split: str) -> int:
        return min(self._task.size(split), self._most.get(split, self._task.size(split)))

    def describe(self) -> Description:
        return self._task.describe() | {"limited_to": {split: self.size(split) for split in self._task.splits}}


def first_batches(task: Task, train: Train, batches: int | None) -> Task:
    """So many batches of each split, as `--limit-batches` says; the whole task for None."""
    return task if batches is None else Limited(task, batches * train.batch, batches * train.eval.batch)


class Sampled(Instead):
    """Shows `samples` of the evaluation split, evenly spread."""

    def __init__(self, task: Task, samples: int) -> None:
        size = task.size("eval")
        super().__init__(task)
        self.whole = task
        self._rows = np.unique(np.linspace(0, size - 1, min(samples, size)).round().astype(np.int64))

    def size(self, split: str) -> int:
        return len(self._rows) if split == "eval" else self._task.size(split)

    def batch(self, split: str, indices: np.ndarray, *, seed: int, epoch: int) -> Batch:
        rows = self._rows[np.asarray(indices)] if split == "eval" else indices
        return self._task.batch(split, rows, seed=seed, epoch=epoch)

    def describe(self) -> Description:
        return self._task.describe() | {"eval_samples": len(self._rows), "eval_sampled_of": self._task.size("eval")}
