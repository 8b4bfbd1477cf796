"""`--limit-batches N`: the first part of a task's data, for a quick look at a recipe."""

from __future__ import annotations

from typing import Any

from leansurgeon.tasks import Task


class Limited:
    """A task that shows the first samples of each split only; everything else is the task itself."""

    def __init__(self, task: Task, train: int, evaluation: int) -> None:
        self._task, self._most = task, {"train": train, "eval": evaluation, "test": evaluation}

    def size(self, split: str) -> int:
        return min(self._task.size(split), self._most.get(split, self._task.size(split)))

    def describe(self) -> dict[str, Any]:
        return self._task.describe() | {"limited_to": {split: self.size(split) for split in self._task.splits}}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_task"], name)
