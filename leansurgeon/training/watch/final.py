"""What is measured when the training is over and its summary stands: announced, bounded, ended by the first Ctrl-C.

A measure that is cut short costs no result: it is missing from the summary, and the exit code is that of success.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from leansurgeon.errors import plural
from leansurgeon.progress import duration_text
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.training import budget, testing
from leansurgeon.training.processes.signals import Wish
from leansurgeon.training.watch import measures

if TYPE_CHECKING:
    from types import FrameType

    from leansurgeon.training.state import Run

LONGEST = 600.0  # seconds, or as long as the training took: after that nobody waits for a measure


class Enough(KeyboardInterrupt):
    """The time is up, or somebody does not want to wait. Nobody below takes it for an error of a model."""


def measured(run: Run, seconds: float) -> JsonObject:
    """What the summary of a training of `seconds` holds besides, as far as it came: `test`, `kappa`, `heads`. To be
    called by all processes.
    """
    found: dict[str, Any] = {}
    if testing.is_wanted(run):
        run.progress.say(f"The result is in {run.folder}; now the test split. Ctrl-C leaves it out.")
        try:
            found["test"] = testing.at_end(run, run.stops.raise_if_asked)
        except Wish:
            run.progress.say("The test split is left out, and so is everything else.")
            return found
    names = measures.wanted_names(run)
    if not names:
        return found
    limit = budget.measures_seconds(run) or max(LONGEST, seconds)
    said = " and ".join(names)
    run.progress.say(
        f"The result is in {run.folder}; now measuring {said}, {duration_text(limit)} at most. Ctrl-C leaves it out."
    )
    start = time.perf_counter()
    try:
        with until(limit):
            measures.at_end(run, found)
    except Enough as end:
        left = [name for name in names if name not in found]
        run.progress.say(f"{plural(len(left), 'measure')} left out ({', '.join(left)}): {end}.")
        return found
    run.progress.say(f"Measured in {duration_text(time.perf_counter() - start)}.")
    return found


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

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)
    before = {number: signal.signal(number, end) for number in numbers}
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, old in before.items():
            signal.signal(number, old if old is not None else signal.SIG_DFL)
