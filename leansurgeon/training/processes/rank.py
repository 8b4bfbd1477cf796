"""Which process of its group this one is, as whoever started it says; known before anything is imported."""

from __future__ import annotations

import os


def is_worker() -> bool:
    """Whether somebody has started this process as one of several already (torchrun, `accelerate launch`, `launch`)."""
    return "RANK" in os.environ


def rank() -> int:
    """This process's number in its group; 0 where there is none."""
    return int(os.environ.get("RANK", "0"))
