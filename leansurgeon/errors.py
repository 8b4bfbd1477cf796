"""Errors that a user should read: one sentence with the numbers, one next step, one exit code.

Everything that leansurgeon expects to go wrong is raised as one of these; `cli.main` prints them and
nothing else catches them.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable


class LeanSurgeonError(Exception):
    """What went wrong (one sentence) and, as `hint`, what to do next."""

    exit_code = 1
    agreed = False  # whether all processes of a training raise it alike

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message


class UsageError(LeanSurgeonError):
    """Wrong flag, wrong number, wrong recipe."""

    exit_code = 2


class UnsupportedModel(LeanSurgeonError):
    """A source that cannot be read, or an architecture that leansurgeon does not know."""

    exit_code = 3


class OutOfMemory(LeanSurgeonError):
    """The device has less memory than one micro batch needs."""

    exit_code = 4


class Diverged(LeanSurgeonError):
    """The loss or a gradient is no longer a finite number."""

    exit_code = 5


class Stopped(LeanSurgeonError):
    """SIGTERM or SIGUSR1, once everything is saved: a scheduler may start the same command again (EX_TEMPFAIL)."""

    exit_code = 75


class Interrupted(LeanSurgeonError):
    """Ctrl-C, once everything has been closed."""

    exit_code = 130


class Terminated(KeyboardInterrupt):
    """SIGTERM as an exception: whatever tidies up after Ctrl-C does so here too."""

    exit_code = 143


def disk_is_full(error: BaseException) -> bool:
    """Whether no space is left, on the disk or of a quota; safetensors raises a class of its own that only quotes the
    system's number.
    """
    full = (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "errno", None) in full or any(f"(os error {number})" in str(error) for number in full)


def memory_is_short(error: BaseException) -> bool:
    """Whether an error means that the machine's memory is used up (torch raises a bare RuntimeError on a CPU, and on a
    GPU where cuBLAS or cuDNN find no room for themselves).
    """
    words = ("allocate memory", "out of memory", "STATUS_ALLOC_FAILED")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def plural(n: int | str, word: str) -> str:
    """`1 layer`, `1,200 layers`, `2/6 layers`."""
    shown = n if isinstance(n, str) else f"{n:,}"
    return f"{shown} {word}" if shown == "1" else f"{shown} {word}s"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`" (did you mean 'lean'?)"`, or an empty string when nothing is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean '{near[0]}'?)" if near else ""
