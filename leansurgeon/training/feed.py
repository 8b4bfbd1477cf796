"""Batches on their way to the device. `order` and the task decide what a batch holds; here is only transport."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from leansurgeon.training import order

if TYPE_CHECKING:
    import torch

    from leansurgeon.tasks import Task
    from leansurgeon.training.plan import Plan

Batch = dict[str, Any]


def train_batches(
    task: Task, plan: Plan, *, seed: int, rank: int, device: torch.device, start: int = 0
) -> Iterator[list[Batch]]:
    """For every optimizer step from `start`: the micro batches of process `rank`, on the device."""

    def made() -> Iterator[list[Batch]]:
        size = task.size("train")
        for step in range(start, plan.steps):
            yield [
                task.batch("train", row, seed=seed, epoch=epoch)
                for epoch, indices in order.groups(seed, plan.position(step), plan.batch_at(step), size, plan.group)
                for row in order.micro_batches(indices, plan.processes, rank, plan.micro)
            ]

    # On a GPU the host is idle while kernels run, so a thread prepares the next two steps. On a CPU it would only take
    # the cores from the model. Both give the same batches: a batch is a pure function of (seed, epoch, indices).
    source = ahead(made(), depth=2) if device.type == "cuda" else made()
    for batches in source:
        yield [to_device(batch, device) for batch in batches]


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The same batch there; from pinned memory and without waiting on CUDA."""
    if device.type == "cpu":
        return batch
    if device.type == "cuda":
        return {key: value.pin_memory().to(device, non_blocking=True) for key, value in batch.items()}
    return {key: value.to(device) for key, value in batch.items()}


def ahead(source: Iterator[Any], depth: int) -> Iterator[Any]:
    """The items of `source`, made up to `depth` ahead in a thread; an exception there is raised here, at its place."""
    items: queue.Queue = queue.Queue(maxsize=depth)
    stop = threading.Event()

    def put(item: Any) -> bool:
        while not stop.is_set():
            try:
                items.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in source:
                if not put((item, None)):
                    return
            put((None, StopIteration()))
        except BaseException as error:  # handed over and raised by the consumer
            put((None, error))

    thread = threading.Thread(target=work, name="leansurgeon-data", daemon=True)
    thread.start()
    try:
        while True:
            item, error = items.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item
    finally:
        stop.set()
        thread.join()
