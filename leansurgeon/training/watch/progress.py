"""What a person sees while training, on stderr: a line that rewrites itself on a terminal, plain lines elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable

_PLAIN_EVERY = 10.0  # seconds between two progress lines that cannot be rewritten


def duration_text(seconds: float) -> str:
    """`59s`, `3m07s`, `2h05m`."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


def rate_text(rate: float, unit: str) -> str:
    """`812 samples/s`, `45.2k tokens/s`."""
    for limit, scale, letter in ((1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if rate >= limit:
            return f"{rate / scale:.1f}{letter} {unit}"
    return f"{rate:.0f} {unit}" if rate >= 10 else f"{rate:.1f} {unit}"


class Progress:
    """Speaks for one process. With `say`, every line goes there; `quiet` (ranks above 0) says nothing at all."""

    def __init__(
        self,
        steps: int | None,
        say: Callable[[str], None] | None = None,
        *,
        quiet: bool = False,
        stream=None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.steps, self.quiet, self.clock = steps, quiet, clock
        self.stream = stream if stream is not None else sys.stderr
        self.rewrites = say is None and getattr(self.stream, "isatty", lambda: False)()
        self._emit = say or self._print
        self._open_line = 0  # length of the line that stands unfinished on the terminal
        self._last_plain: float | None = None

    def step(
        self,
        done: int,
        *,
        loss: float,
        lr: float,
        rate: float,
        unit: str,
        eta: float,
        mfu: float | None = None,
        waiting: float | None = None,
        memory: int | None = None,
        fraction: float | None = None,
    ) -> None:
        """Show the state after `done` steps: `rate` in `unit`, `eta` in seconds, `mfu` and `waiting` (for data) as
        shares, `memory` in bytes; `fraction` of the training is shown where its steps are not known (`steps` is None).
        """
        if self.quiet:
            return
        where = f"{done}/{self.steps}" if self.steps is not None else f"{done} ({100 * (fraction or 0):.1f} %)"
        parts = [f"step {where}", f"loss {loss:.4f}", f"lr {lr:.2e}", rate_text(rate, unit)]
        parts += [f"mfu {100 * mfu:.0f} %"] if mfu is not None else []
        parts += [f"data {100 * waiting:.0f} %"] if waiting is not None else []
        parts += [f"{memory / 1e9:.2f} GB"] if memory else []
        text = "  ".join([*parts, f"eta {duration_text(eta)}"])
        if self.rewrites:
            width = shutil.get_terminal_size().columns - 1
            self.stream.write("\r" + text[:width].ljust(min(self._open_line, width)))
            self.stream.flush()
            self._open_line = len(text)
            return
        now = self.clock()
        if self._last_plain is None or now - self._last_plain >= _PLAIN_EVERY or done == self.steps:
            self._last_plain = now
            self._emit(text)

    def say(self, text: str) -> None:
        """A line that stays."""
        if self.quiet:
            return
        self.clear()
        self._emit(text)

    def clear(self) -> None:
        """Wipe the unfinished line, so that what follows starts on a clean one."""
        if self._open_line:
            width = shutil.get_terminal_size().columns - 1
            self.stream.write("\r" + " " * min(self._open_line, width) + "\r")
            self.stream.flush()
            self._open_line = 0

    def _print(self, text: str) -> None:
        print(text, file=self.stream, flush=True)
