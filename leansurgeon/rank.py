"""Which process of its group this one is, as whoever started it says, and what cores it has; known before anything is
imported.
"""

from __future__ import annotations

import os

SIZE, RANK, LOCAL, HERE, HOST, PORT = GROUP = (
    "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


def processes() -> int:
    """Processes of its group; 1 where there is none, or what is said of it goes not together."""
    return 1 if contradiction() else max(1, number(SIZE))


def is_worker() -> bool:
    """Whether somebody has started this process as one of several already (torchrun, `accelerate launch`, `launch`)."""
    return processes() > 1


def rank() -> int:
    """This process's number in its group; 0 where there is none."""
    return number(RANK) if is_worker() else 0


def is_first_here() -> bool:
    """Whether this is the first of the processes that were started on this machine."""
    return number(LOCAL) == 0


def number(name: str) -> int:
    """What an environment variable says; 0 for what is no number."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 0


def group_variables() -> dict[str, str]:
    """All that the environment says of a group of processes."""
    return {name: os.environ[name] for name in GROUP if name in os.environ}


def contradiction() -> str | None:
    """What the environment says of a group that cannot be; None where there is none, or one that can."""
    there, size = group_variables(), max(1, number(SIZE))
    for name, text in there.items():
        if name != HOST and (not text.isdecimal() or (int(text) == 0 and name in (SIZE, PORT))):
            return f"The environment says {name}='{text}', which is no number that it can have."
    if size > 1 and (lacks := [name for name in (RANK, HOST, PORT) if not there.get(name)]):
        return f"The environment says {SIZE}={size}, and nothing of {', '.join(lacks)}: the {size} cannot meet."
    if late := next((name for name in (RANK, LOCAL) if number(name) >= size), None):
        return f"The environment says {late}={there[late]}, and there is room for {size} by its {SIZE}."
    return None


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
