"""Training data: which samples a step takes, how batches reach the device, and tasks restricted to part of their data.

The order is a pure function of (seed, epoch, step), the same for every number of processes. Nothing here has a state,
so nothing has to be saved (Accelerate's own loaders do not restore their order after a resume). A batch is a pure
function of (seed, epoch, indices), so it does not matter who makes it and when: this process, a thread that prefetches
for the GPU (except for tasks that seed the global generators), or `train.workers` processes.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from leansurgeon.errors import LeanSurgeonError
from leansurgeon.tasks import Task
from leansurgeon.tasks.base import Batch, Description
from leansurgeon.tasks.chance import mix_number
from leansurgeon.training.processes.signals import HEARD
from leansurgeon.training.recipe.schema import Train
from leansurgeon.training.runs import folder as runfolder
from leansurgeon.training.schedule import Plan

_ORDER, _DROPOUT, _MIXING, _GROUPS = 1, 2, 3, 4  # names of independent random streams
LOOKAHEAD = 50  # groups that are sorted by length together, as in transformers


@lru_cache(maxsize=2)
def epoch_order(seed: int | None, epoch: int, size: int) -> np.ndarray:
    """Return all indices below `size`, shuffled: `(size,)` int64, read-only; the same on every machine. Seed None keeps
    the order.
    """
    order = np.arange(size)
    if seed is not None:
        order = np.random.Generator(np.random.PCG64([_ORDER, seed, epoch])).permutation(size)
    order.setflags(write=False)
    return order


def order_by_length(order: np.ndarray, lengths: np.ndarray, seed: int, epoch: int, group: int) -> np.ndarray:
    """Reorder samples into groups of similar length to reduce padding.

    Sorts `LOOKAHEAD` groups at a time, then shuffles all whole groups. The remainder stays at the end.
    """
    order, whole = order.copy(), len(order) // group * group
    for start in range(0, whole, LOOKAHEAD * group):
        part = order[start : min(whole, start + LOOKAHEAD * group)]
        part[:] = part[np.argsort(lengths[part], kind="stable")]
    draws = np.random.Generator(np.random.PCG64([_GROUPS, seed, epoch]))
    order[:whole] = order[:whole].reshape(-1, group)[draws.permutation(whole // group)].ravel()
    return order


def list_groups(
    order: Callable[[int], np.ndarray], position: int, samples: int, size: int, group: int
) -> list[tuple[int, np.ndarray]]:
    """Return epoch and sample indices `(group,)` for `samples` samples from `position`, counted over all epochs.

    Each epoch follows its own `order`; its incomplete last group is dropped.
    """
    per_epoch, parts = size // group * group, []
    for start in range(position, position + samples, group):
        epoch, place = divmod(start, per_epoch)
        parts.append((epoch, order(epoch)[place : place + group]))
    return parts


def split_micro_batches(indices: np.ndarray, processes: int, rank: int, micro: int) -> np.ndarray:
    """Return the rows of one global batch that process `rank` computes: `(accumulation, micro)`.

    Over all ranks the rows are the global batch, each sample once, whatever the number of processes.
    """
    return indices.reshape(-1, processes, micro)[:, rank]


def list_eval_batches(size: int, batch: int, processes: int, rank: int) -> list[np.ndarray]:
    """Return the evaluation batches of process `rank`: consecutive samples, dealt in turn; the last may be shorter.

    The batches are the same for every number of processes, and together hold each sample exactly once.
    """
    starts = range(0, size, batch)[rank::processes]
    return [np.arange(start, min(start + batch, size)) for start in starts]


def dropout_seed(seed: int, step: int, rank: int) -> int:
    """Return the seed of torch's generators for one step of one process: 64 bits, a pure function of its arguments."""
    return _mixed(_DROPOUT, seed, step, rank)


def mixing_seed(seed: int, epoch: int, step: int) -> int:
    """Return the seed for mixing samples in one step, the same for all its micro batches and processes: 32 bits."""
    return _mixed(_MIXING, seed, epoch, step) >> 32


def _mixed(mixed: int, *numbers: int) -> int:
    for number in numbers:
        mixed = mix_number(mixed + number)
    return mixed


def train_batches(task: Task, plan: Plan, *, rank: int, device: torch.device, start: int = 0) -> Iterator[list[Batch]]:
    """Yield, for every optimizer step from `start`, the micro batches of process `rank` on the device."""
    train, size = plan.train, task.size("train")

    @lru_cache(maxsize=2)
    def order(epoch: int) -> np.ndarray:
        shuffled = epoch_order(train.order_seed, epoch, size)
        lengths = task.lengths("train") if train.order == "by-length" else None
        return shuffled if lengths is None else order_by_length(shuffled, lengths, train.seed, epoch, plan.group)

    def rows() -> Iterator[tuple[int, np.ndarray]]:
        for step in range(start, plan.steps):
            first, samples = plan.position(step), plan.batch_at(step)
            for epoch, indices in list_groups(order, first, samples, size, plan.group):
                for row in split_micro_batches(indices, plan.processes, rank, plan.micro):
                    yield epoch, row

    # Here and not at the first `next`, so that the main thread starts the processes before any other thread exists.
    batches = make_batches(task, "train", rows(), seed=train.seed, workers=train.workers)

    def by_step() -> Iterator[list[Batch]]:
        for step in range(start, plan.steps):
            yield [next(batches) for _ in range(plan.batch_at(step) // (plan.processes * plan.micro))]

    # On a GPU the host is idle while kernels run, so a thread prepares the next two steps. On a CPU it would take cores
    # from the model. It must not run where the task draws from the global generators: the steps seed these meanwhile
    # (dropout, mixup), and samples would depend on timing.
    here = device.type != "cuda" or (train.workers == 0 and task.draws_globally)
    source = by_step() if here else prefetch(by_step(), depth=2)

    def on_device() -> Iterator[list[Batch]]:
        try:
            for micro_batches in source:
                yield [to_device(batch, device) for batch in micro_batches]
        finally:
            source.close()
            batches.close()

    return on_device()


def make_batches(
    task: Task, split: str, rows: Iterable[tuple[int, np.ndarray]], *, seed: int, workers: int = 0
) -> Iterator[Batch]:
    """Yield the batch of every `(epoch, indices)` of `rows`, in order, made by `workers` processes, or here if 0.

    Close it, so that the processes end. Raises what the task raises; for any other exception in a worker, a
    `LeanSurgeonError` that names it.
    """
    if workers == 0:
        return (task.batch(split, indices, seed=seed, epoch=epoch) for epoch, indices in rows)
    # Workers inherit the block: a signal before `_begin` would kill one.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    try:
        loader = DataLoader(
            _Batches(task, split, seed),
            sampler=rows,
            batch_size=None,  # a row is a whole batch
            num_workers=workers,
            # Python 3.14's default, a fork server, would not inherit the block and would receive the task as a pickle.
            multiprocessing_context="fork",
            prefetch_factor=2,  # batches ahead, of each process
            collate_fn=lambda batch: batch,
            worker_init_fn=_begin,
            generator=torch.Generator(),  # torch's default would advance the training's generator
        )
        return _receive(iter(loader))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _receive(source: Iterator[Any]) -> Iterator[Batch]:
    try:
        for item in source:
            if isinstance(item, LeanSurgeonError):
                raise item
            yield item
    finally:
        # torch does this when the iterator is garbage collected, which an exception's traceback can delay. A process
        # that exits would then wait for workers that ignore SIGTERM.
        source._shutdown_workers()


class _Batches:
    """The data set of a worker process: `(epoch, indices)` -> batch, or an error as a value, since one that is raised
    here would arrive wrapped in its traceback.
    """

    def __init__(self, task: Task, split: str, seed: int) -> None:
        self.task, self.split, self.seed = task, split, seed

    def __getitem__(self, row: tuple[int, np.ndarray]) -> Batch | LeanSurgeonError:
        epoch, indices = row
        try:
            return self.task.batch(self.split, indices, seed=self.seed, epoch=epoch)
        except LeanSurgeonError as error:
            return error
        except Exception as error:
            said = f"A data worker failed with {type(error).__name__}: {error}"
            return LeanSurgeonError(said, "--set train.workers=0 shows where it comes from.")


def _begin(worker: int) -> None:
    """Ignore signals and leave the run folder to the parent.

    A signal to the whole group (Ctrl-C, a scheduler) is for the training alone, which needs its data to finish the
    step. A worker ends when the training closes it, or some seconds after the training is gone.
    """
    runfolder.leave_to_parent()
    for number in HEARD:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)  # blocked by `make_batches`; pending ones were just dropped


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return the batch on `device`; on CUDA from pinned memory, without blocking."""
    if device.type == "cuda":
        return {key: value.pin_memory().to(device, non_blocking=True) for key, value in batch.items()}
    return {key: value.to(device) for key, value in batch.items()}


def prefetch(source: Iterator[Any], depth: int) -> Iterator[Any]:
    """Yield the items of `source`, made up to `depth` ahead in a thread; an exception there is raised here in order."""
    end = object()
    thread = ThreadPoolExecutor(1, thread_name_prefix="leansurgeon-data")
    try:
        waiting = deque(thread.submit(next, source, end) for _ in range(depth))
        while (item := waiting.popleft().result()) is not end:
            waiting.append(thread.submit(next, source, end))
            yield item
    finally:
        thread.shutdown(cancel_futures=True)


class TaskProxy:
    """A wrapper around a task that forwards whatever a subclass does not override."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __getattr__(self, name: str) -> Any:
        if "_task" not in self.__dict__:  # during unpickling in a worker process
            raise AttributeError(name)
        return getattr(self._task, name)


class FirstSamples(TaskProxy):
    """Restricts a task to the first samples of each split."""

    def __init__(self, task: Task, train: int, evaluation: int) -> None:
        super().__init__(task)
        self._most = {"train": train, "eval": evaluation, "test": evaluation}

    def size(self, split: str) -> int:
        return min(self._task.size(split), self._most[split])

    def lengths(self, split: str) -> np.ndarray | None:
        lengths = self._task.lengths(split)
        return None if lengths is None else lengths[: self.size(split)]

    def describe(self) -> Description:
        return self._task.describe() | {"limited_to": {split: self.size(split) for split in self._task.splits}}


def first_batches(task: Task, train: Train, batches: int | None) -> Task:
    """Return the task limited to `batches` batches per split (`--limit-batches`); the whole task for None."""
    return task if batches is None else FirstSamples(task, batches * train.batch, batches * train.eval.batch)


class SpreadSamples(TaskProxy):
    """Restricts the evaluation split to `samples` evenly spread samples."""

    def __init__(self, task: Task, samples: int) -> None:
        size = task.size("eval")
        super().__init__(task)
        self.whole = task
        self._rows = np.unique(np.linspace(0, size - 1, min(samples, size)).round().astype(np.int64))

    def size(self, split: str) -> int:
        return len(self._rows) if split == "eval" else self._task.size(split)

    def batch(self, split: str, indices: np.ndarray, *, seed: int, epoch: int) -> Batch:
        if split != "eval":
            return self._task.batch(split, indices, seed=seed, epoch=epoch)
        batch = self._task.batch(split, self._rows[np.asarray(indices)], seed=seed, epoch=epoch)
        if "_index" in batch:  # position among the samples that are used
            batch = batch | {"_index": torch.from_numpy(np.asarray(indices, dtype=np.int64))}
        return batch

    def describe(self) -> Description:
        return self._task.describe() | {"eval_samples": len(self._rows), "eval_sampled_of": self._task.size("eval")}
