"""Tasks with their data prepared, and all samples of a part."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np

from leansurgeon import tasks


def prepare(cache: Path, name: str, model_dir=None, workers=1, say=lambda line: None, **options) -> tasks.Task:
    """A task, after a way through another process."""
    task = tasks.make(name, options)
    task.prepare(cache, model_dir, workers=workers, say=say)
    return pickle.loads(pickle.dumps(task))


def everything(task: tasks.Task, split: str = "train", seed: int = 0, epoch: int = 0):
    """One batch of all samples of a part."""
    return task.batch(split, np.arange(task.size(split)), seed=seed, epoch=epoch)
