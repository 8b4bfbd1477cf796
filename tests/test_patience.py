"""The guard against hanging finds those that wait for ever and those that spin, and leaves slow ones alone."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.support.patience import family, left, working_until

SLEEP, SPIN = "import time; time.sleep(600)", "while True: pass"
CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}])"


@pytest.fixture
def start():
    started = []

    def begin(code: str) -> subprocess.Popen:
        started.append(subprocess.Popen([sys.executable, "-c", code]))
        return started[-1]

    yield begin
    for process in started:
        for child in family(process.pid) if process.poll() is None else []:
            child.kill()
        process.kill()
        process.wait()


@pytest.mark.parametrize("code", [SLEEP, SPIN, CHILD], ids=["waits", "spins", "its child spins"])
def test_who_never_comes_to_an_end_is_given_up(code, start):
    process = start(code)
    assert not working_until(lambda: process.poll() is not None, [process.pid], patience=1)
    assert process.poll() is None


def test_who_is_at_work_may_take_longer_than_patience_on_the_clock(start):
    """It works a little all the time, as a process does beside many others."""
    process = start(
        "import time\nfor _ in range(12):\n e = time.process_time() + .1\n while time.process_time() < e: 0\n"
        " time.sleep(0.15)"
    )
    assert working_until(lambda: process.poll() is not None, [process.pid], patience=1.5)
    assert process.returncode == 0


def test_who_has_ended_is_waited_for_no_more(start):
    process = start("")
    process.wait()
    before = time.monotonic()
    assert not working_until(lambda: False, [process.pid])
    assert time.monotonic() - before < 5


def test_who_is_left(start):
    process = start(CHILD)
    working_until(lambda: bool(family(process.pid)), [process.pid])
    (child,) = family(process.pid)
    assert left([child]) == [child]
    child.kill()
    process.wait()
    assert left([child]) == []
