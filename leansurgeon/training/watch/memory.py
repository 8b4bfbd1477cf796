"""Peak memory of training: the allocator's peak on CUDA, the peak resident set of the process on a CPU.

Only training is counted: `pause` before an evaluation or a save, `resume` after it.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


class PeakMemory:
    """A stop watch for memory; `bytes` is the largest peak over all stretches between `resume` and `pause`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes = 0
        self.kind = "cuda allocator peak" if device.type == "cuda" else "process peak RSS"

    def resume(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            reset_peak_rss()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done inside is no part of training."""
        self.pause()
        yield
        self.resume()

    def now(self) -> int:
        """The peak so far, in the middle of a stretch."""
        self.pause()
        return self.bytes

    def pause(self) -> None:
        if self.device.type == "cuda":
            self.bytes = max(self.bytes, torch.cuda.max_memory_allocated(self.device))
        else:
            self.bytes = max(self.bytes, peak_rss())


def reset_peak_rss() -> bool:
    """Let the kernel start anew with this process's peak (proc(5), clear_refs). False where there is no such file."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_rss() -> int:
    """Peak resident set of this process in bytes, since the last reset where the system can reset it."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        # ru_maxrss is in kilobytes on Linux and in bytes on macOS, and counts from the start of the process.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
