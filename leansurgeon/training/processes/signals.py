"""SIGTERM, SIGUSR1 and Ctrl-C as requests: the training finishes its step, saves, and ends with the right exit code.

A second Ctrl-C ends at once. All processes must agree before one of them stops, since the others would wait for it: all
call `StopSignals.raise_if_asked` at the same places. `until` limits the time of a piece of work.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from leansurgeon.errors import Stopped, Terminated
from leansurgeon.progress import duration_text
from leansurgeon.training.processes.agree import ProcessGroup

HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
STOP, INTERRUPT = 1, 2  # SIGTERM and SIGUSR1 (a scheduler may restart the command); Ctrl-C
_AGAIN = 1.0  # seconds after which a second Ctrl-C counts: a launcher may repeat what the terminal has already sent


class StopRequested(Exception):
    """Raised once all processes have agreed to stop; `kind` is `STOP` or `INTERRUPT`."""

    def __init__(self, kind: int) -> None:
        super().__init__(kind)
        self.kind = kind


class StopSignals:
    """The request of this process, and the agreement of all."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.request = 0
        self._owner = os.getpid()
        self.every = 1  # steps between two checks, about a second where a check costs time
        self._since = 0.0

    def raise_if_asked(self) -> None:
        """Raise `StopRequested` on every process alike, with `STOP` or `INTERRUPT`, if one was asked to stop."""
        if kind := self.group.largest([self.request])[0]:
            raise StopRequested(int(kind))

    def heard(self, number: int, frame: FrameType | None) -> None:
        """The signal handler. Processes forked meanwhile still die of SIGTERM."""
        if os.getpid() != self._owner:
            os._exit(128 + number)
        if number != signal.SIGINT:
            self.request = max(self.request, STOP)
            return
        if self._since and time.monotonic() - self._since > _AGAIN:
            raise KeyboardInterrupt
        self._since = self._since or time.monotonic()
        self.request = INTERRUPT


@contextmanager
def handle_signals(numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle these signals with `handler` inside the context."""
    before = {}
    with suppress(ValueError):  # not in the main thread, where no signal arrives
        for number in numbers:
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old or signal.SIG_DFL)


@contextmanager
def raising(sentence: str) -> Iterator[None]:
    """Let SIGTERM and SIGUSR1 end the block with `Stopped` and this sentence, after everything inside has cleaned up.
    Inside it is a `Terminated`, which no code there takes for an error of a model.
    """

    def heard(number: int, frame: FrameType | None) -> None:
        raise Terminated

    with handle_signals((signal.SIGTERM, signal.SIGUSR1), heard):
        try:
            yield
        except Terminated:
            raise Stopped(sentence) from None


class TimeUp(KeyboardInterrupt):
    """The time is up, or the user does not want to wait. No code below takes it for an error of a model."""


@contextmanager
def until(seconds: float) -> Iterator[None]:
    """End the block with `TimeUp` after `seconds`, or at the first signal. Outside the main thread, where no signal
    arrives, nothing ends it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeUp(f"{duration_text(seconds)} are over" if number == signal.SIGALRM else "interrupted")

    with handle_signals((*HEARD, signal.SIGALRM), end):
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
