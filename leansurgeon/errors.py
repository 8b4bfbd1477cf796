"""Errors for the user: one sentence with the numbers, one next step, one exit code.

Every expected failure is raised as one of these; `cli.main` prints them and nothing else catches them.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class LeanSurgeonError(Exception):
    """What went wrong (one sentence) and, as `hint`, what to do next."""

    exit_code = 1
    agreed = False  # whether all processes of a training raise it alike

    def __init__(self, message: str, hint: str | None = None) -> None:
        self.message = readable(message)
        self.hint = readable(hint) if hint else hint
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message


class UsageError(LeanSurgeonError):
    """A wrong flag, number or recipe."""

    exit_code = 2


@contextmanager
def raised_as(kind: type[LeanSurgeonError]) -> Iterator[None]:
    """Raise a `UsageError` of the block as `kind` instead: an unreadable model has another exit code than a recipe."""
    try:
        yield
    except UsageError as error:
        raise kind(error.message, error.hint) from None


class UnsupportedModel(LeanSurgeonError):
    """A source that cannot be read, or an architecture that leansurgeon does not know."""

    exit_code = 3


class OutOfMemory(LeanSurgeonError):
    """The device has less memory than a micro batch, a cut or its result needs."""

    exit_code = 4


class Diverged(LeanSurgeonError):
    """The loss or a gradient is no longer finite."""

    exit_code = 5


class Stopped(LeanSurgeonError):
    """SIGTERM or SIGUSR1, once everything is saved: a scheduler may start the same command again (EX_TEMPFAIL)."""

    exit_code = 75


class Interrupted(LeanSurgeonError):
    """Ctrl-C, once everything is closed."""

    exit_code = 130


class NotPushed(LeanSurgeonError):
    """The hub did not accept a result, which stays complete where it is."""


class RunFolderReplaced(LeanSurgeonError):
    """The folder of a training was deleted or replaced while it ran."""


class Terminated(KeyboardInterrupt):
    """SIGTERM as an exception, so that code that cleans up after Ctrl-C does so here too."""

    exit_code = 143


def disk_is_full(error: BaseException) -> bool:
    """Return whether the disk or a quota is full; safetensors raises its own class, which only quotes the system's
    error number.
    """
    full = (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "errno", None) in full or any(f"(os error {number})" in str(error) for number in full)


# Errors of a path: too long, a loop of links, inside a file or in a place that this user may not use.
_OF_A_NAME = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS)


def in_words(error: BaseException) -> LeanSurgeonError | None:
    """Return an error as the one sentence to end with; None for a bug of this program."""
    if isinstance(error, LeanSurgeonError):
        return error
    if disk_is_full(error):
        return LeanSurgeonError(
            "The disk is full; what was complete before is kept.",
            "Free some space, or choose another folder.",
        )
    if isinstance(error, OSError) and error.errno in _OF_A_NAME and error.filename is not None:
        return UsageError(f"{error.filename} cannot be used: {os.strerror(error.errno).lower()}.", "Name another path.")
    return None


def memory_is_short(error: BaseException) -> bool:
    """Return whether an error means that memory is used up (torch raises a bare RuntimeError on a CPU, and on a GPU if
    cuBLAS or cuDNN cannot allocate).
    """
    words = ("allocate memory", "out of memory", "STATUS_ALLOC_FAILED", "bad_alloc", "cublasCreate")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


_LIMITED = reprlib.Repr()
_LIMITED.maxlevel, _LIMITED.maxdict, _LIMITED.maxlist, _LIMITED.maxtuple = 4, 20, 20, 20
_LIMITED.maxstring = _LIMITED.maxother = _LIMITED.maxlong = 300
WORD, SENTENCE = 200, 2_000  # most columns of a word, and of a message


def readable(text: str) -> str:
    """Return a message made safe for a terminal, whatever it quotes: control characters are escaped, and the middle of
    long text is cut.

    >>> readable("There is no preset 'a" + 5000 * "a" + "'.").count("a") < 200
    True
    """
    plain = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    cut = re.sub(rf"\S{{{WORD + 1},}}", lambda word: short(word[0], WORD), plain)
    return short(cut, SENTENCE)


def short(words: str, room: int) -> str:
    """Return at most `room` columns; cut the middle, since a path or a list says most at its ends.

    >>> short("/home/someone/runs/digits-vit/lean", 20)
    '/home...its-vit/lean'
    """
    front = (room - 3) // 3
    return words if len(words) <= room else f"{words[:front]}...{words[front + 3 - room :]}"


def quote(value: object, room: int = 60) -> str:
    """Return a value of a foreign file as a message shows it: as Python writes it, cut to `room` columns.

    >>> quote({"a": [0] * 100}, 20)
    "{'a':... 0, 0, ...]}"
    """
    return short(_LIMITED.repr(value), room)


def plural(n: int | str, word: str) -> str:
    """Return `1 layer`, `1,200 layers`, `2/6 layers`."""
    shown = n if isinstance(n, str) else f"{n:,}"
    return f"{shown} {word}" if shown == "1" else f"{shown} {word}s"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `" (did you mean 'lean'?)"`, or an empty string if nothing is close."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean '{near[0]}'?)" if near else ""
