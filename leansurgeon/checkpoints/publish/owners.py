"""Who wrote what lies unfinished on a disk, and whether that process still lives.

A process is its number, the moment it started, and the kernel it runs on: numbers come back, and a folder may be seen
from several machines and containers. Of a process on another machine nothing can be known, so it counts as living.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

# The last part was four digits until 2026-11: a hundred folders at once in one process met one another 1 time in 14.
TAG = re.compile(r"-([0-9a-f]{8})-([0-9a-f]{8})-(\d+)-(\d+)-(?:[0-9a-f]{4}|[0-9a-f]{16})$")


@dataclass(frozen=True)
class Owner:
    """`host` and `boot` are eight digits that stand for the machine's name and for its present start."""

    host: str
    boot: str
    pid: int
    start: int  # in ticks since the boot; 0 where the system does not say

    @property
    def tag(self) -> str:
        """The end of the name of something that this process writes, another one each time; `of_name` reads it."""
        return f"-{self.host}-{self.boot}-{self.pid}-{self.start}-{os.urandom(8).hex()}"

    @property
    def dead(self) -> bool:
        """Whether that process has certainly ended."""
        if self.boot != boot():
            return self.host == host()  # this machine, before it was started again
        return not lives(self.pid, self.start)


def me() -> Owner:
    """This process."""
    return Owner(host(), boot(), os.getpid(), started(os.getpid()))


def of_name(name: str) -> Owner | None:
    """The process that a leftover's name carries, None without one."""
    match = TAG.search(name)
    return Owner(match[1], match[2], int(match[3]), int(match[4])) if match else None


@cache
def host() -> str:
    """Eight hex digits of the hash of this machine's name."""
    return sha256(socket.gethostname().encode()).hexdigest()[:8]


@cache
def boot() -> str:
    """The present run of the kernel; the machine's name where it does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", "")[:8]
    except OSError:
        return host()


def started(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 where that cannot be told."""
    try:
        # The name of the program stands in parentheses and may hold anything.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def lives(pid: int, start: int) -> bool:
    """Whether the process `pid` of this machine runs and is the one that began at `start` (0: any)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is somebody else's
        pass
    return not start or started(pid) in (0, start)
