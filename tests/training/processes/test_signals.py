"""A signal ends what is done wherever it arrives: also where Python loses exceptions, or where errors are expected."""

from __future__ import annotations

import os
import signal
import sys
import time
import weakref
from types import SimpleNamespace

import pytest

from leansurgeon.cli.main import sigterm_as_exception
from leansurgeon.errors import Stopped, Terminated
from leansurgeon.search import outcome as search
from leansurgeon.training.processes.signals import insisting, raising


def _lose(number: int, how: str) -> None:
    """Have the signal arrive where Python prints an exception and goes on."""

    class Thing:
        def __del__(self):
            if how == "finalizer":
                os.kill(os.getpid(), number)

    thing = Thing()
    reference = weakref.ref(thing, lambda _: os.kill(os.getpid(), number) if how == "callback" else None)
    del thing
    assert reference() is None  # the signal came, and this line is reached all the same


def handlers() -> tuple:
    """What a signal must find as it was."""
    return sys.unraisablehook, *map(signal.getsignal, (signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT))


LOST = {
    "usr1": (lambda: raising("Stopped."), signal.SIGUSR1, Stopped),
    "any-command": (sigterm_as_exception, signal.SIGTERM, Terminated),
    "ctrl-c": (insisting, signal.SIGINT, KeyboardInterrupt),
}


@pytest.fixture(autouse=True)
def ctrl_c_is_heard():
    """A job that a shell starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("how", ["callback", "finalizer"])
@pytest.mark.parametrize("case", LOST)
def test_a_signal_in_a_finalizer_ends_the_work_all_the_same(case, how):
    context, number, error = LOST[case]
    before = handlers()
    with pytest.raises(error) as raised, context():
        _lose(number, how)
        time.sleep(20)
        pytest.fail("the signal was lost")
    assert type(raised.value) is error and handlers() == before


def test_a_signal_that_was_lost_at_the_very_end_is_raised_there():
    with pytest.raises(Stopped, match="Nothing is lost"), raising("Nothing is lost."):
        _lose(signal.SIGTERM, "callback")


def test_work_that_fails_with_a_signal_just_lost_leaves_nothing_behind(monkeypatch):
    """Also where the alarm comes just before it is called off."""
    before, alarms = handlers(), []

    def late(which: int, seconds: float) -> None:
        alarms.append(seconds)
        if not seconds:
            os.kill(os.getpid(), signal.SIGALRM)

    monkeypatch.setattr(signal, "setitimer", late)
    with pytest.raises(ValueError, match="of its own"), raising("Stopped."):
        _lose(signal.SIGTERM, "callback")
        raise ValueError("of its own")
    assert len(alarms) == 2 and alarms[1] == 0  # set, and called off
    assert handlers() == before


def test_a_signal_in_a_memory_rehearsal_is_no_model_without_memory(monkeypatch):
    """A model whose memory cannot be predicted is said and passed over; a signal meanwhile is not such a model."""
    monkeypatch.setattr(search.limits, "training_memory", lambda *rest: os.kill(os.getpid(), signal.SIGTERM))
    candidate, unknown = SimpleNamespace(name="a", shape=None), {"a": SimpleNamespace(memory=None)}
    with pytest.raises(Stopped), raising("Stopped."):
        search.with_memory(None, [candidate], unknown, None)
