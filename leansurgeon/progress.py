"""Progress of long work on stderr: a bar on a terminal, plain lines elsewhere.

    for layer in track(layers, "source layers", "layers/s"):
        ...
    with phase("evaluating", 40, "batches/s") as advance:
        for batch in batches:
            ...
            advance()

The command sets the screen with `show_on`; without one, nothing is shown. `rich` draws the bar (it respects NO_COLOR
and the width of the terminal) and is imported only to draw one.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from leansurgeon.rank import rank
from leansurgeon.words import wrap

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

PLAIN_EVERY = 10.0  # seconds between two lines that cannot be rewritten
REDRAW = 0.1  # seconds between two updates of a bar
T = TypeVar("T")
Say = Callable[[str], None]  # a function that takes messages
Advance = Callable[..., None]  # called when units of a phase are done, with their number (default: one)


def duration_text(seconds: float) -> str:
    """Return `59s`, `3m07s`, `2h05m`."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


def rate_text(rate: float, unit: str) -> str:
    """Return `812 samples/s`, `45.2k tokens/s`."""
    for limit, scale, letter in ((1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if rate >= limit:
            return f"{rate / scale:.1f}{letter} {unit}"
    return f"{rate:.0f} {unit}" if rate >= 10 else f"{rate:.1f} {unit}"


class Screen:
    """The output of one process. With `say` every line goes there; `quiet` shows nothing at all."""

    def __init__(
        self,
        say: Say | None = None,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.quiet, self.clock = quiet, clock
        self.stream = stream if stream is not None else sys.stderr
        self.rewrites = say is None and getattr(self.stream, "isatty", lambda: False)()
        self._emit = say or partial(print, file=self.stream, flush=True)
        self._bar: RichProgress | None = None
        self._last: float | None = None
        self.pieces: list[Piece] = []  # running phases, the outermost first

    def show(self, text: str, share: float | None, *, always: bool = False) -> None:
        """Show the state: `text` and, if known, the share that is done (0 to 1). Redraws at a limited rate, or at once
        with `always`.
        """
        now = self.clock()
        every = REDRAW if self.rewrites else PLAIN_EVERY
        if self.quiet or not (always or self._last is None or now - self._last >= every):
            return
        self._last = now
        if not self.rewrites:
            self._emit(text)
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn
            from rich.table import Column

            said = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="crop"))
            console = Console(file=self.stream, highlight=False)
            quiet = {"redirect_stdout": False, "redirect_stderr": False, "auto_refresh": False, "transient": True}
            self._bar = Progress(BarColumn(bar_width=12), said, console=console, **quiet)
            self._bar.add_task(text, total=1.0)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], description=text, completed=share or 0.0, total=1.0)
        self._bar.refresh()

    def begin(self) -> None:
        """Delay the first output: quick work needs no line."""
        self._last = self.clock()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if self.quiet:
            return
        self.clear()
        self._emit(text)

    def clear(self) -> None:
        """Erase the bar, so that what follows starts on a clean line."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


@dataclass
class Piece:
    """A running phase of `total` units; `rate` names units per second."""

    title: str
    total: int
    rate: str
    began: float
    done: int = 0


def line(pieces: Sequence[Piece], now: float) -> tuple[str, float]:
    """Return the text for nested phases, the outermost first, and the share of the outermost that is done. The rate is
    that of the innermost, the remaining time that of the whole.
    """
    share = 0.0
    for piece in reversed(pieces):
        share = min(1.0, (piece.done + share) / max(1, piece.total))
    inner, seconds = pieces[-1], seconds_left(pieces, now)
    places = ", ".join(f"{piece.title}: {piece.done:,}/{piece.total:,}" for piece in pieces)
    parts = [places]
    if inner.done:
        parts.append(rate_text(inner.done / max(now - inner.began, 1e-9), inner.rate))
    if seconds is not None:
        parts.append(f"eta {duration_text(seconds)}")
    return "  ".join(parts), share


def seconds_left(pieces: Sequence[Piece], now: float) -> float | None:
    """Return the seconds until the outermost phase ends; None if nothing is done. Remaining units take as long as those
    before them, the first as long as the phase inside it, though one unit may hold several such phases in sequence.
    """
    seconds = unit = None
    until = now
    for piece in reversed(pieces):
        innermost = piece is pieces[-1]
        if piece.done:
            unit = (until - piece.began) / piece.done
        if unit is not None:
            here = 0.0 if innermost else max(0.0, unit - (now - until)) if seconds is None else seconds
            seconds = here + unit * max(0, piece.total - piece.done - (not innermost))
            unit = now - piece.began + seconds
        until = piece.began
    return seconds


@contextmanager
def phase(title: str, total: int, rate: str, screen: Screen | None = None) -> Iterator[Advance]:
    """Show a phase of `total` units if it takes longer than a moment; yield a function that takes the number of units
    done (default: one). Phases may be nested. `screen` defaults to the one of `show_on`.
    """
    screen = screen or _SCREEN.get()
    piece, depth = Piece(title, total, rate, screen.clock()), len(screen.pieces)
    if not depth:
        screen.begin()
    screen.pieces.append(piece)

    def advance(units: int = 1) -> None:
        piece.done += units
        screen.show(*line(screen.pieces, screen.clock()))

    try:
        yield advance
    finally:
        del screen.pieces[depth:]  # with nested phases that were not closed
        if not depth:
            screen.clear()


def track(items: Collection[T], title: str, rate: str) -> Iterator[T]:
    """Yield `items` one by one, as a `phase` on the command's screen."""
    with phase(title, len(items), rate) as advance:
        for item in items:
            yield item
            advance()


# The command's screen. Threads, and programs that use the package as a library, have a silent one.
_SILENT = Screen(quiet=True)
_SCREEN: ContextVar[Screen] = ContextVar("screen", default=_SILENT)


def command_screen(talk: Say | None = None) -> Screen:
    """Return a screen on stderr, or one that passes lines to `talk`. Of the processes of one training only the first
    shows anything.
    """
    return Screen(talk, quiet=rank() > 0)


@contextmanager
def show_on(screen: Screen) -> Iterator[None]:
    """Show phases inside the block on `screen`, and clear it at the end."""
    before = _SCREEN.set(screen)
    try:
        yield
    finally:
        screen.clear()
        _SCREEN.reset(before)


def on_a_terminal() -> bool:
    """Return whether phases are drawn as a bar that rewrites itself, so that frequent updates are useful."""
    screen = _SCREEN.get()
    return screen.rewrites and not screen.quiet


_LOCK = threading.Lock()
# previous values of process-wide settings, for each block that changes them
_BEFORE: dict[Callable[..., Any], list[Any]] = {}


@contextmanager
def change_setting(write: Callable[[Any], Any], value: Any, read: Callable[[], Any]) -> Iterator[None]:
    """Give a setting of the whole process this value inside the block. With blocks in several threads, the last one to
    end restores the original value.
    """
    with _LOCK:
        before = _BEFORE.setdefault(write, [])
        before.append(read())
        write(value)
    try:
        yield
    finally:
        with _LOCK:
            was = before.pop()
            if not before:
                write(was)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' bars and load reports inside the block; leansurgeon reports what matters. Restores the
    previous verbosity, since the process may belong to another program.
    """
    from transformers.utils import logging

    with (
        change_setting(show_bars, False, logging.is_progress_bar_enabled),
        change_setting(logging.set_verbosity, logging.ERROR, logging.get_verbosity),
    ):
        yield


def show_bars(shown: bool) -> None:
    """Set whether transformers draws bars."""
    from transformers.utils import logging

    (logging.enable_progress_bar if shown else logging.disable_progress_bar)()


def size_text(size: float) -> str:
    """Return bytes in the most readable unit.

    >>> size_text(3_200_000_000), size_text(48_000), size_text(0)
    ('3.2 GB', '48 kB', '0 bytes')
    """
    unit, name = next((u for u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if size >= u[0]), (1, "bytes"))
    return f"{size / unit:.3g} {name}"


def silent(text: str) -> None:
    """Discard a message."""


def say(text: str) -> None:
    """Print a message on stderr, in lines of 80 columns. Of the processes of one training only the first prints."""
    if rank() > 0:
        return
    _SCREEN.get().clear()
    for piece in text.split("\n"):
        print("\n".join(wrap(piece, "  ")), file=sys.stderr, flush=True)
