"""Batches on their way to the device. `order` and the task decide what a batch holds; here is only transport.

A batch is a pure function of (seed, epoch, indices), so it makes no difference who makes it and when: this process, a
thread ahead of the GPU (not of tasks that seed the generators of the whole process), or `train.workers` processes.
"""

from __future__ import annotations

import signal
import sys
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from leansurgeon import errors
from leansurgeon.errors import LeanSurgeonError
from leansurgeon.tasks import Task
from leansurgeon.training.data import order
from leansurgeon.training.plan import Plan
from leansurgeon.training.runs import folder as runfolder

Batch = dict[str, Any]
_AHEAD = 2  # batches that each worker process makes ahead
_UNHEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # by workers
# Said here, since Python 3.14 changed its own way to a server, whose children inherit neither what this process holds
# back (`_held_back`) nor the task, which they would be sent in a pickle. Elsewhere a fork is not safe.
_START = "fork" if sys.platform == "linux" else None


def train_batches(
    task: Task, plan: Plan, *, seed: int, rank: int, device: torch.device, start: int = 0, workers: int = 0
) -> Iterator[list[Batch]]:
    """For every optimizer step from `start`: the micro batches of process `rank`, on the device."""

    def rows() -> Iterator[tuple[int, np.ndarray]]:
        size, ordered_by = task.size("train"), None if plan.train.order == "as-stored" else seed
        for step in range(start, plan.steps):
            for epoch, indices in order.groups(ordered_by, plan.position(step), plan.batch_at(step), size, plan.group):
                for row in order.micro_batches(indices, plan.processes, rank, plan.micro):
                    yield epoch, row

    # Here and not at the first `next`, so that processes are started by the main thread, before any other is.
    batches = made(task, "train", rows(), seed=seed, workers=workers)
    # On a GPU the host is idle while kernels run, so a thread prepares the next two steps. On a CPU it would only take
    # the cores from the model. Nor may it where it would make samples with the generators of this process: the steps
    # seed them meanwhile (dropout, mixup), and samples would follow from who comes first.
    here = device.type != "cuda" or (workers == 0 and task.draws_globally)
    return _steps(batches, plan, device, start, here)


def _steps(batches: Iterator[Batch], plan: Plan, device: torch.device, start: int, here: bool) -> Iterator[list[Batch]]:
    def grouped() -> Iterator[list[Batch]]:
        for step in range(start, plan.steps):
            yield [next(batches) for _ in range(plan.batch_at(step) // (plan.processes * plan.micro))]

    source = grouped() if here else ahead(grouped(), depth=2)
    try:
        for micro_batches in source:
            yield [to_device(batch, device) for batch in micro_batches]
    finally:
        source.close()
        batches.close()


def made(
    task: Task, split: str, rows: Iterable[tuple[int, np.ndarray]], *, seed: int, workers: int = 0
) -> Iterator[Batch]:
    """The batch of every `(epoch, indices)` of `rows`, in their order; made by `workers` processes, or here if 0.

    To be closed, so that the processes end. Raises what the task raises; of another exception in a worker, a
    `LeanSurgeonError` that names it.
    """
    if workers == 0:
        return (task.batch(split, indices, seed=seed, epoch=epoch) for epoch, indices in rows)
    with warnings.catch_warnings(), _held_back():  # a signal that came before `_begin` would end a worker
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # `setup` says it, once
        loader = DataLoader(
            _Batches(task, split, seed),
            sampler=rows,
            batch_size=None,  # a row is a batch already
            num_workers=workers,
            multiprocessing_context=_START,
            prefetch_factor=_AHEAD,
            collate_fn=_as_it_is,
            worker_init_fn=_begin,
            generator=torch.Generator(),  # torch's own would move the generator of the training
        )
        started = iter(loader)
    return _received(started)


@contextmanager
def _held_back() -> Iterator[None]:
    """Signals that workers are not to hear wait for a while; processes started meanwhile begin so."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _UNHEARD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _received(source: Iterator[Any]) -> Iterator[Batch]:
    try:
        for item in source:
            if isinstance(item, _Failure):
                raise getattr(errors, item.kind, LeanSurgeonError)(item.message, item.hint)
            yield item
    finally:
        # torch does so when the iterator is forgotten, which an exception's traceback can put off; and a process that
        # ends would then wait for workers that hear no SIGTERM.
        source._shutdown_workers()


class _Failure(NamedTuple):
    """What a worker says instead of a batch: an exception of its own would arrive wrapped in its traceback."""

    kind: str
    message: str
    hint: str | None


class _Batches:
    """The data set that a worker process sees: `(epoch, indices)` -> batch."""

    def __init__(self, task: Task, split: str, seed: int) -> None:
        self.task, self.split, self.seed = task, split, seed

    def __getitem__(self, row: tuple[int, np.ndarray]) -> Batch | _Failure:
        epoch, indices = row
        try:
            return self.task.batch(self.split, indices, seed=self.seed, epoch=epoch)
        except LeanSurgeonError as error:
            return _Failure(type(error).__name__, error.message, error.hint)
        except Exception as error:
            said = f"A data worker failed with {type(error).__name__}: {error}"
            return _Failure("LeanSurgeonError", said, "--set train.workers=0 shows where it comes from.")


def _as_it_is(batch: Batch) -> Batch:
    return batch


def _begin(worker: int) -> None:
    """A signal to the whole group (Ctrl-C, a scheduler) is for the training alone, which needs its data to finish the
    step. A worker ends when the training closes it, or some seconds after that is gone; its run folder is free at once.
    """
    runfolder.leave_to_parent()
    for number in _UNHEARD:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _UNHEARD)  # see `_held_back`; what waited is forgotten by now


def dead_worker(error: BaseException) -> LeanSurgeonError | None:
    """The sentence for a data worker that was killed; None for any other error. torch raises it wherever the main
    thread is at that moment.
    """
    if not isinstance(error, RuntimeError) or "DataLoader worker" not in str(error):
        return None
    short = "shared memory" in str(error) or "Bus error" in str(error)
    return LeanSurgeonError(
        "A data worker process was killed" + (": /dev/shm is full." if short else "; memory may have run short."),
        "Fewer train.workers or a smaller train.micro_batch need less; --resume auto goes on from the last checkpoint.",
    )


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The same batch there; from pinned memory and without waiting on CUDA."""
    if device.type == "cpu":
        return batch
    if device.type == "cuda":
        return {key: value.pin_memory().to(device, non_blocking=True) for key, value in batch.items()}
    return {key: value.to(device) for key, value in batch.items()}


def ahead(source: Iterator[Any], depth: int) -> Iterator[Any]:
    """The items of `source`, made up to `depth` ahead in a thread; an exception there is raised here, at its place."""
    end = object()
    thread = ThreadPoolExecutor(1, thread_name_prefix="leansurgeon-data")
    try:
        waiting = deque(thread.submit(next, source, end) for _ in range(depth))
        while (item := waiting.popleft().result()) is not end:
            waiting.append(thread.submit(next, source, end))
            yield item
    finally:
        thread.shutdown(cancel_futures=True)
