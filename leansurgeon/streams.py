"""stdout and stderr that nobody reads, that are full, or that are not there.

stdout is data: nobody reading any more is no error, a full disk is. stderr is talk: no fault of it may cost a result.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class Outlet:
    """A text stream whose faults in `forgiven` end it quietly: what is written from then on goes nowhere."""

    def __init__(self, inner: TextIO, forgiven: type[OSError]) -> None:
        self._inner, self._forgiven = inner, forgiven

    def write(self, text: str) -> int:
        """Write as the stream itself does; characters that its encoding lacks are escaped."""
        try:
            return self._inner.write(text)
        except UnicodeEncodeError:
            encoding = self._inner.encoding or "ascii"
            return self._inner.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except self._forgiven:
            self._close()
            return len(text)

    def writelines(self, lines: Iterator[str]) -> None:
        """Write each."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write what is buffered."""
        try:
            self._inner.flush()
        except self._forgiven:
            self._close()

    def _close(self) -> None:
        """Let the descriptor, and with it what is buffered and the processes that inherit it, write to nowhere."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._inner.fileno())
        os.close(nowhere)
        with suppress(OSError):
            self._inner.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def ensure_descriptors() -> None:
    """Open what is closed of the descriptors 0 to 2, lest the next file be one and be written to as a stream."""
    while (handle := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(handle)


def guard() -> None:
    """Make this process's stdout and stderr forgiving, for good."""
    # A missing stderr would send `print(..., file=sys.stderr)` to stdout. The files stay open as long as the process.
    out = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    talk = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stdout, sys.stderr = Outlet(out, BrokenPipeError), Outlet(talk, OSError)  # type: ignore[assignment]


@contextmanager
def guarded() -> Iterator[None]:
    """`guard` for the length of a block."""
    before = sys.stdout, sys.stderr
    guard()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
