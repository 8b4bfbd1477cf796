"""Decisions that all processes of a training must make alike: to stop, to save, or that a file could not be written.

They communicate over the CPU (gloo), so that it costs no wait for a GPU. With one process nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from leansurgeon.errors import LeanSurgeonError, OutOfMemory, in_words, memory_is_short

COLLECTIVE_TIMEOUT = timedelta(hours=2)  # rank 0 may measure kappa or prepare data while the others wait


class LostProcesses(LeanSurgeonError):
    """Another process of this training has ended, with or without a reason."""

    agreed = True


def explain_lost_processes(error: RuntimeError) -> LostProcesses | None:
    """Return the error for what gloo or NCCL raise in the remaining processes; None for any other error."""
    text = str(error)
    parted = ("onnection closed", "onnection reset", "Broken pipe", "remote process exited", "ncclRemoteError")
    backend = type(error).__name__ in ("DistBackendError", "DistNetworkError") or "gloo" in text
    if not backend or not any(word in text for word in parted):
        return None
    return LostProcesses(
        "Another process of this training has ended.", "--resume auto continues from the last checkpoint."
    )


class ProcessGroup:
    """The processes of one training. All of them must call every method, in the same order."""

    def __init__(self, processes: int = 1, rank: int = 0) -> None:
        self.processes, self.rank = processes, rank
        self._group = None
        if processes > 1:
            import torch.distributed as dist

            # A new gloo group would have gloo's default timeout of half an hour.
            alone = dist.get_backend() == "gloo"
            self._group = dist.group.WORLD if alone else dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)

    def largest(self, values: list[float]) -> list[float]:
        """Return the largest of each value over the processes."""
        if self.processes == 1:
            return values
        import torch
        import torch.distributed as dist

        shared = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._group)
        return shared.tolist()

    def of_main(self, values: list[float]) -> list[float]:
        """Return the values of rank 0."""
        return self.largest([value if self.rank == 0 else float("-inf") for value in values])

    def everywhere(self, work: Callable[[], Any]) -> Any:
        """Do `work` on every process; if it fails on one, all raise that error, as one sentence."""
        result, failed = None, None
        try:
            result = work()
        except Exception as error:
            failed = error
        if self.processes > 1:
            import torch.distributed as dist

            told: list[Any] = [None] * self.processes
            dist.all_gather_object(told, failed and as_all_raise(failed), group=self._group)
            for error in filter(None, told):
                raise error from failed
        elif failed:
            raise failed
        return result

    def on_main(self, work: Callable[[], Any]) -> Any:
        """Do `work` on rank 0 only; its error is raised on all."""
        return self.everywhere(lambda: work() if self.rank == 0 else None)

    def share(self, work: Callable[[], Any]) -> Any:
        """Do `work` on rank 0 and return its result on every process; its error is raised on all."""
        box = [self.on_main(work)]
        if self.processes > 1:
            import torch.distributed as dist

            dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]


def as_all_raise(error: Exception) -> LeanSurgeonError:
    """Return the error that all processes raise for what one of them raised."""
    kind = OutOfMemory if memory_is_short(error) else LeanSurgeonError
    said = in_words(error) or kind(f"{type(error).__name__}: {error}")
    said.agreed = True
    return said
