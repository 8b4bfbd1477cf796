"""What may take only so long, and ends at the first Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from leansurgeon.progress import duration_text
from leansurgeon.training.processes.signals import handled

if TYPE_CHECKING:
    from types import FrameType


class Enough(KeyboardInterrupt):
    """The time is up, or somebody does not want to wait. Nobody below takes it for an error of a model."""


@contextmanager
def until(seconds: float) -> Iterator[None]:
    """End what is done with `Enough` after so many seconds, or at the first signal; outside the main thread, where no
    signal arrives, nothing ends it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise Enough(f"{duration_text(seconds)} are over" if number == signal.SIGALRM else "interrupted")

    with handled((signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM), end):
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
