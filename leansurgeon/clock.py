"""When the command that this process carries out began, on the clock of `time.perf_counter`: what is done "in 20m"
counts from there, with the time that Python takes to load.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_marked: float | None = None


def mark() -> None:
    """For the entry point of a process: the command began when the process did."""
    global _marked
    _marked = time.perf_counter() - age()


def began() -> float:
    """When the command began: now, in a process that does more than one."""
    return time.perf_counter() if _marked is None else _marked


def age() -> float:
    """Seconds since this process began; 0 where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
        return max(0.0, up - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0
