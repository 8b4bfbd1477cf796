"""When this process's command began, on the clock of `time.perf_counter`. A limit such as "in 20m" counts from there,
including the time that Python takes to load.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

_marked: float | None = None


def mark() -> None:
    """Mark the start of the process as the start of the command. For the entry point of a process."""
    global _marked
    _marked = time.perf_counter()
    with suppress(OSError, ValueError, IndexError):  # the system may not tell how old the process is
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
        _marked -= max(0.0, up - ticks / os.sysconf("SC_CLK_TCK"))


def began() -> float:
    """Return when the command began; now, in a process that runs more than one."""
    return time.perf_counter() if _marked is None else _marked
