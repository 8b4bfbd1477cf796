"""How far long work is, on stderr: a bar that rewrites itself on a terminal, plain lines elsewhere.

    for layer in track(layers, "source layers", "layers/s"):
        ...
    with phase("evaluating", 40, "batches/s") as advance:
        for batch in batches:
            ...
            advance()

Which screen that is the command says (`show_on`); where nobody says it, nothing is shown.

`rich` draws the bar (it heeds NO_COLOR and the width of the terminal) and is imported when there is one to draw.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TextIO, TypeVar

from leansurgeon.rank import rank
from leansurgeon.words import wrap

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from tqdm import tqdm

PLAIN_EVERY = 10.0  # seconds between two lines that cannot be rewritten
REDRAW = 0.1  # seconds between two drawings of a bar
T = TypeVar("T")
Say = Callable[[str], None]  # what talk goes to


class Advance(Protocol):
    """What is called when units of a phase are done."""

    def __call__(self, units: int = 1) -> None: ...


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
        self._emit = say or partial(print, file=self.stream, flush=True)
        self._bar: RichProgress | None = None
        self._last: float | None = None
        self.pieces: list[Piece] = []  # what goes on, the outermost first

    def show(self, text: str, share: float | None, *, always: bool = False) -> None:
        """The state of what goes on: `text` and, where it is known, the share that is done (0 to 1). Shown as often as
        the place bears it, and `always` where nothing follows.
        """
        now = self.clock()
        every = REDRAW if self.rewrites else PLAIN_EVERY
        if self.quiet or not (always or self._last is None or now - self._last >= every):
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


@dataclass
class Piece:
    """Work of `total` units that goes on; `rate` names units per second."""

    title: str
    total: int
    rate: str
    began: float
    done: int = 0


def line(pieces: Sequence[Piece], now: float) -> tuple[str, float]:
    """What is shown of pieces that lie in each other, the outermost first, and the share of the outermost that is done.
    The rate is that of the innermost, the time left that of the whole.
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
    """Seconds until the outermost piece ends; None where nothing is done. Units of a piece take what those before them
    took, the first what the piece inside it takes: one unit may hold several such pieces, one after the other.
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
    """A piece of work of `total` units, which is shown where it takes longer than a moment; call what is given with the
    number of units that were done (one). Pieces may lie in each other. Without `screen` it is the one of `show_on`.
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
        del screen.pieces[depth:]  # also what lies inside and was left without a word
        if not depth:
            screen.clear()


def track(items: Collection[T], title: str, rate: str) -> Iterator[T]:
    """`items` one by one, as a `phase` of the place where this command shows how far it is."""
    with phase(title, len(items), rate) as advance:
        for item in items:
            yield item
            advance()


# Where the command shows how far its work is. Threads and who uses the package as a library have a silent one.
_SILENT = Screen(quiet=True)
_SCREEN: ContextVar[Screen] = ContextVar("screen", default=_SILENT)


def command_screen(talk: Callable[[str], None] | None = None) -> Screen:
    """stderr, or line by line what `talk` is told; of the processes of one training only the first shows anything."""
    return Screen(talk, quiet=rank() > 0)


@contextmanager
def show_on(screen: Screen) -> Iterator[None]:
    """Phases inside the block are shown there, and nothing of them is left when it ends."""
    before = _SCREEN.set(screen)
    try:
        yield
    finally:
        screen.clear()
        _SCREEN.reset(before)


def is_shown() -> bool:
    """Whether anybody is told how far the work is."""
    return not _SCREEN.get().quiet


def on_a_terminal() -> bool:
    """Whether phases are drawn as a bar that rewrites itself, so that looking often is worth while."""
    screen = _SCREEN.get()
    return screen.rewrites and not screen.quiet


_LOCK = threading.Lock()
_BEFORE: dict[Callable[..., Any], list[Any]] = {}  # what settings of the process were, for each block that changes them


@contextmanager
def change_setting(write: Callable[[Any], Any], value: Any, read: Callable[[], Any]) -> Iterator[None]:
    """A setting of the whole process has this value while the block runs. Of blocks in several threads the last one to
    end puts back what was there before the first.
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
    """transformers without bars and load reports while the block runs; what matters is said by us. Afterwards it is as
    talkative as it was, since the process may be somebody else's.
    """
    from transformers.utils import logging

    with (
        change_setting(show_bars, False, logging.is_progress_bar_enabled),
        change_setting(logging.set_verbosity, logging.ERROR, logging.get_verbosity),
    ):
        yield


def show_bars(shown: bool) -> None:
    """Whether transformers draws bars."""
    from transformers.utils import logging

    (logging.enable_progress_bar if shown else logging.disable_progress_bar)()


def downloads() -> type[tqdm[Any]] | None:
    """What huggingface_hub is to draw its bars with: they are shown where phases are. None, which leaves it to its own,
    where nothing is shown.
    """
    screen = _SCREEN.get()
    if screen.quiet:
        return None
    from tqdm import tqdm

    bars: list[Download] = []
    began = screen.clock()

    class Download(tqdm):  # type: ignore[type-arg]
        """Bytes of all files together; the hub counts what came over the network and what was written apart."""

        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(*args, **options | {"file": io.StringIO(), "disable": False})
            bars.append(self)

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            most = max((bar.n for bar in bars if bar.unit == "B"), default=0)
            if self.unit == "B" and self.total and self.n >= most:
                piece = Piece("downloading, MB", int(self.total / 1e6), "MB/s", began, done=int(self.n / 1e6))
                screen.show(*line([piece], screen.clock()))

        def close(self) -> None:
            super().close()
            screen.clear()

    screen.begin()
    return Download


def size_text(size: float) -> str:
    """Bytes in the unit that shows them.

    >>> size_text(3_200_000_000), size_text(48_000), size_text(0)
    ('3.2 GB', '48 kB', '0 bytes')
    """
    unit, name = next((u for u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if size >= u[0]), (1, "bytes"))
    return f"{size / unit:.3g} {name}"


def silent(text: str) -> None:
    """Talk that nobody wants."""


def say(text: str) -> None:
    """Talk on stderr, in lines of 80 columns. Of the processes of one training only the first speaks."""
    if rank() > 0:
        return
    _SCREEN.get().clear()
    for piece in text.split("\n"):
        print("\n".join(wrap(piece, "  ")), file=sys.stderr, flush=True)
