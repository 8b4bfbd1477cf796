"""Resolve the device that the user names, and measure free memory. Imports torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from leansurgeon.errors import UsageError


def choose_device(asked: str) -> str:
    """Resolve `auto` to the first GPU if there is one, else the CPU; `cpu`, `cuda` and `cuda:1` mean themselves.

    Raises `UsageError` for other words and for a GPU that does not exist.
    """
    known = re.fullmatch(r"auto|cpu|cuda(?::([0-9]+))?", asked)
    if known is None:
        raise UsageError(f"--device {asked}: give auto, cpu, cuda or a GPU by its number, such as cuda:1.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "auto":
        return "cuda:0" if count else "cpu"
    if asked == "cpu":
        return asked
    place = int(known[1] or 0)
    if place >= count:
        there = "no GPU" if not count else "one GPU, cuda:0" if count == 1 else f"the GPUs cuda:0 to cuda:{count - 1}"
        raise UsageError(f"--device {asked}: torch finds {there} here.")
    return f"cuda:{place}"


MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Return the available bytes of host memory, within a container's limit; if unknown, all of the machine's
    memory.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    if MEMINFO.is_file():
        said = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines() if ":" in line)
        limits += [1024 * int(said["MemAvailable"].split()[0])] if "MemAvailable" in said else []
    limit, used, kinds = (CGROUP / name for name in ("memory.max", "memory.current", "memory.stat"))
    if kinds.is_file() and limit.is_file() and limit.read_text().strip().isdecimal():
        of = dict(line.split() for line in kinds.read_text().splitlines())
        taken = int(used.read_text()) - int(of.get("inactive_file", 0))  # cached files can be dropped
        limits.append(max(0, int(limit.read_text()) - taken))
    return min(limits)
