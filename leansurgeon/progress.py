"""How far long work is, on stderr: a bar that rewrites itself on a terminal, plain lines elsewhere.

    with phase("Evaluating", 40, "batches/s", screen) as advance:
        for batch in batches:
            ...
            advance()

`rich` draws the bar (it heeds NO_COLOR and the width of the terminal) and is imported when there is one to draw.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from leansurgeon.words import wrap

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

PLAIN_EVERY = 10.0  # seconds between two lines that cannot be rewritten
REDRAW = 0.1  # seconds between two drawings of a bar


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


class Screen:
    """Where one process speaks. With `say` every line goes there; `quiet` says nothing at all."""

    def __init__(
        self,
        say: Callable[[str], None] | None = None,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.quiet, self.clock = quiet, clock
        self.stream = stream if stream is not None else sys.stderr
        self.rewrites = say is None and getattr(self.stream, "isatty", lambda: False)()
        self._emit = say or self._print
        self._bar: RichProgress | None = None
        self._last: float | None = None

    def show(self, text: str, share: float | None, *, always: bool = False) -> None:
        """The state of what goes on: `text` and, where it is known, the share that is done (0 to 1). Shown as often as
        the place bears it, and `always` where nothing follows.
        """
        now = self.clock()
        if self.quiet or not (always or self._last is None or now - self._last >= self._every):
            return
        self._last = now
        if self.rewrites:
            self._draw(text, share)
        else:
            self._emit(text)

    def begin(self) -> None:
        """Nothing is shown until some time has passed: what is quick needs no line."""
        self._last = self.clock()

    def say(self, text: str) -> None:
        """A line that stays."""
        if self.quiet:
            return
        self.clear()
        self._emit(text)

    def clear(self) -> None:
        """Wipe the bar, so that what follows starts on a clean line."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    @property
    def _every(self) -> float:
        return REDRAW if self.rewrites else PLAIN_EVERY

    def _draw(self, text: str, share: float | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        if self._bar is None:
            said = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="crop"))
            console = Console(file=self.stream, highlight=False)
            quiet = {"redirect_stdout": False, "redirect_stderr": False, "auto_refresh": False, "transient": True}
            self._bar = Progress(BarColumn(bar_width=12), said, console=console, **quiet)
            self._bar.add_task(text, total=1.0)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], description=text, completed=share or 0.0, total=1.0)
        self._bar.refresh()

    def _print(self, text: str) -> None:
        print(text, file=self.stream, flush=True)


@contextmanager
def phase(title: str, total: int, rate: str, screen: Screen) -> Iterator[Callable[[], None]]:
    """A piece of work of `total` units, which is shown where it takes longer than a moment; call what is given once a
    unit. `rate` names units per second.
    """
    try:
        yield _advancing(title, total, rate, screen)
    finally:
        screen.clear()


def _advancing(title: str, total: int, rate: str, screen: Screen) -> Callable[[], None]:
    """What is called once a unit, and shows how far it is."""
    began, done = screen.clock(), 0

    def advance() -> None:
        nonlocal done
        done += 1
        spent = max(screen.clock() - began, 1e-9)
        left = duration_text((total - done) * spent / done)
        screen.show(f"{title}: {done:,}/{total:,}  {rate_text(done / spent, rate)}  eta {left}", done / max(1, total))

    screen.begin()
    return advance


def say(text: str) -> None:
    """Talk on stderr, in lines of 80 columns. Of the processes of one training only the first speaks."""
    if os.environ.get("RANK", "0") != "0":
        return
    for line in text.split("\n"):
        print("\n".join(wrap(line, "  ")), file=sys.stderr, flush=True)


def screen_of(talk: Callable[[str], None]) -> Screen:
    """Where `talk` speaks: the terminal itself for `say`, so that a bar can be drawn; else line by line."""
    return Screen(None if talk is say else talk, quiet=os.environ.get("RANK", "0") != "0")


def counted(name: str, total: int) -> Callable[[], None]:
    """A bar on a terminal, elsewhere a line every ten seconds; it goes with the last unit."""
    screen, left = screen_of(say), total
    advance = _advancing(name, total, "a second", screen)

    def step() -> None:
        """One more is done."""
        nonlocal left
        left -= 1
        advance()
        if left <= 0:
            screen.clear()

    return step
