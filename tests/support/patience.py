"""Waiting for other processes, on a machine of any load: by what they do and not by a clock on the wall.

A process beside twenty others is slow and all right; one that waits for something that never comes does nothing at all;
one that goes round in a circle uses processor time without end. The last two are errors, and both are told apart from
the first by processor time alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

_NOTHING = 1 / 120  # of the time, on a processor: what threads that only watch use


def working_until(condition: Callable[[], bool], roots: list[int], patience: float = 60) -> bool:
    """Wait until `condition()`, as long as the processes `roots` and their children are at work. False when they have
    done nothing for `patience` seconds, have used `patience` seconds of processor time each root, or are all gone.
    """
    used: dict[int, float] = {}
    since, then = time.monotonic(), 0.0
    while not condition():
        alive = [_look(root, used) for root in roots]
        total = sum(used.values())
        if total > then + _NOTHING * patience:
            since, then = time.monotonic(), total
        if not any(alive) or time.monotonic() - since > patience or total > patience * len(roots):
            return condition()
        time.sleep(0.05)
    return True


def _look(root: int, used: dict[int, float]) -> bool:
    """Note the processor time of a process and everything below it; whether it is there."""
    try:
        process = psutil.Process(root)
        for each in (process, *process.children(recursive=True)):
            times = each.cpu_times()
            used[each.pid] = times.user + times.system
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it, or a child between two lines
        return psutil.pid_exists(root)


def family(root: int) -> list[psutil.Process]:
    """All processes below this one."""
    return psutil.Process(root).children(recursive=True)


def left(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that run still; what has ended and nobody has asked for does not."""
    found = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found
