"""Which process of its group this one is, according to the environment, and what cores it has. Imports
nothing heavy.
"""

from __future__ import annotations

import os

SIZE, RANK, LOCAL, HERE, HOST, PORT = GROUP = (
    "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


def processes() -> int:
    """Return the number of processes in the group; 1 if there is none, or the environment contradicts itself."""
    return 1 if contradiction() else max(1, number(SIZE))


def is_worker() -> bool:
    """Return whether this process was started as one of several (by torchrun, `accelerate launch` or `launch`)."""
    return processes() > 1


def rank() -> int:
    """Return this process's number in its group; 0 if there is none."""
    return number(RANK) if is_worker() else 0


def is_first_here() -> bool:
    """Return whether this is the first of the processes on this machine."""
    return number(LOCAL) == 0


def number(name: str) -> int:
    """Return an environment variable as a number; 0 if it is none."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 0


def group_variables() -> dict[str, str]:
    """Return the environment variables that describe a group of processes."""
    return {name: os.environ[name] for name in GROUP if name in os.environ}


def contradiction() -> str | None:
    """Return why the environment's description of a group is impossible; None if there is none, or it is consistent."""
    there, size = group_variables(), max(1, number(SIZE))
    for name, text in there.items():
        if name != HOST and (not text.isdecimal() or (int(text) == 0 and name in (SIZE, PORT))):
            return f"The environment says {name}='{text}', which is not a valid number for it."
    if size > 1 and (lacks := [name for name in (RANK, HOST, PORT) if not there.get(name)]):
        return f"The environment says {SIZE}={size}, but not {', '.join(lacks)}: the {size} processes cannot meet."
    if late := next((name for name in (RANK, LOCAL) if number(name) >= size), None):
        return f"The environment says {late}={there[late]}, but its {SIZE} is {size}."
    return None


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))
