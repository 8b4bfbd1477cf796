"""Which process of its group this one is, as whoever started it says, and what cores it has; known before anything is
imported.
"""

from __future__ import annotations

import os


def is_worker() -> bool:
    """Whether somebody has started this process as one of several already (torchrun, `accelerate launch`, `launch`)."""
    return "RANK" in os.environ


def rank() -> int:
    """This process's number in its group; 0 where there is none, or what is said is no number."""
    said = os.environ.get("RANK", "0")
    return int(said) if said.isdecimal() else 0


def is_first_here() -> bool:
    """Whether this is the first of the processes that were started on this machine."""
    return os.environ.get("LOCAL_RANK") == "0"


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
