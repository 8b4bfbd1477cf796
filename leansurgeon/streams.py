"""stdout and stderr that are closed, full or missing.

stdout is data: a closed reader is no error, a full disk is. stderr is messages: no fault of it may cost a result.
stdout may show text from foreign files, so control sequences for a terminal are escaped.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

_COLOUR = r"\x1b\[[0-9;]*m"  # harmless, and used by help
_STEERS = re.compile(rf"{_COLOUR}|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")


def harmless(text: str) -> str:
    """Return the text with control characters escaped, except line ends, tabs and colors. The escapes are those of
    JSON, so that a document's meaning does not change.

    >>> harmless("a\\x1b]0;title\\x07b")
    'a\\\\u001b]0;title\\\\u0007b'
    """
    return _STEERS.sub(lambda m: m[0] if len(m[0]) > 1 else f"\\u{ord(m[0]):04x}", text)


class Outlet:
    """A text stream that survives the errors in `forgiven`: from then on, output is discarded. `steers` says whether
    output may move the cursor, as progress does.
    """

    def __init__(self, inner: TextIO, forgiven: type[OSError], *, steers: bool = True) -> None:
        self._inner, self._forgiven, self._steers = inner, forgiven, steers

    def write(self, text: str) -> int:
        """Write as the stream itself does; characters that its encoding lacks are escaped."""
        text = text if self._steers else harmless(text)
        try:
            return self._inner.write(text)
        except UnicodeEncodeError:
            encoding = self._inner.encoding or "ascii"
            return self._inner.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except self._forgiven:
            self._close()
            return len(text)

    def writelines(self, lines: Iterator[str]) -> None:
        """Write each line."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write what is buffered."""
        try:
            self._inner.flush()
        except self._forgiven:
            self._close()

    def _close(self) -> None:
        """Redirect the descriptor, with its buffer and the processes that inherit it, to os.devnull."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._inner.fileno())
        os.close(nowhere)
        with suppress(OSError):
            self._inner.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def ensure_descriptors() -> None:
    """Open closed descriptors 0 to 2, so that no other file gets one of them and is written to as a stream."""
    while (handle := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(handle)


def guard() -> None:
    """Make this process's stdout and stderr survive such errors, for good."""
    # Without a stderr, `print(..., file=sys.stderr)` would go to stdout. The files stay open as long as the process.
    out = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    talk = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stdout = Outlet(out, BrokenPipeError, steers=False)  # type: ignore[assignment]
    sys.stderr = Outlet(talk, OSError)  # type: ignore[assignment]


@contextmanager
def guarding() -> Iterator[None]:
    """Apply `guard` inside a block."""
    before = sys.stdout, sys.stderr
    guard()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
