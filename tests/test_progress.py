"""Phases that lie in each other: what stands on the line, when it is shown, and that nothing of it is left behind."""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from leansurgeon.progress import Piece, Screen, line, phase, quiet_transformers, show_on, track


def screen() -> tuple[Screen, SimpleNamespace, io.StringIO]:
    """A screen on a file, and a clock whose seconds (`now`) a test sets."""
    clock, file = SimpleNamespace(now=0.0), io.StringIO()
    return Screen(stream=file, clock=lambda: clock.now), clock, file


def test_time_left_counts_what_lies_inside():
    """2 of 4 and half of the third are 62.5 % after 50 s: 30 s are left. The rate is that of the inner work."""
    pieces = [Piece("rung", 4, "tries/s", began=0.0, done=2), Piece("layers", 10, "layers/s", began=40.0, done=5)]
    text, share = line(pieces, 50.0)
    assert (text, share) == ("rung: 2/4, layers: 5/10  0.5 layers/s  eta 30s", 0.625)


@pytest.mark.parametrize(
    ("pieces", "now", "eta"),
    [
        # A unit of several pieces: the second of them began after 20 s, and one step of 144 took a quarter of a second.
        ([Piece("spans", 1, "spans/s", 0.0), Piece("steps", 144, "steps/s", 20.0, done=1)], 20.25, "36s"),
        ([Piece("spans", 3, "spans/s", 0.0, done=1), Piece("steps", 9, "steps/s", 60.0)], 70.0, "1m50s"),
    ],
)
def test_units_take_what_those_before_them_took_or_what_lies_inside(pieces, now, eta):
    assert line(pieces, now)[0].endswith(f"eta {eta}")


def test_lines_come_seldom_where_they_cannot_be_rewritten():
    place, clock, file = screen()
    with show_on(place):
        for _ in track(range(5), "candidates", "candidates/s"):
            for _ in track(range(4), "layers", "layers/s"):
                clock.now += 1.5  # 30 s in all, so two lines: at 10.5 s and at 21 s
    assert [text.split("  ")[0] for text in file.getvalue().splitlines()] == [
        "candidates: 1/5, layers: 3/4",
        "candidates: 3/5, layers: 2/4",
    ]


def test_work_that_breaks_off_leaves_nothing_on_the_line():
    place, clock, file = screen()
    with show_on(place):
        with pytest.raises(ValueError), phase("outer", 3, "units/s"):
            for _ in track(range(3), "inner", "units/s"):
                raise ValueError
        for _ in track(range(2), "next", "units/s"):
            break
        assert not place.pieces
        with phase("last", 1, "units/s") as advance:
            clock.now = 20.0
            advance()
    assert file.getvalue() == "last: 1/1  0.1 units/s  eta 0s\n"


def test_libraries_and_threads_are_silent(capsys):
    place, clock, file = screen()

    def work() -> None:
        for _ in track(range(3), "work", "units/s"):
            clock.now += 60

    work()
    with show_on(place):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert file.getvalue() == "" and capsys.readouterr().err == ""


@pytest.mark.filterwarnings("ignore:Cannot enable progress bars")
def test_transformers_is_as_talkative_as_before_when_a_model_was_loaded(saved):
    """The process may be somebody else's, who wants to hear transformers."""
    from transformers.utils import logging

    from leansurgeon.checkpoints.model import load

    folder, _ = saved("llama")
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    try:
        for bars, level in ((True, logging.INFO), (False, logging.WARNING)):
            (logging.enable_progress_bar if bars else logging.disable_progress_bar)()
            logging.set_verbosity(level)
            load(folder)
            with pytest.raises(ZeroDivisionError), quiet_transformers():
                assert (logging.is_progress_bar_enabled(), logging.get_verbosity()) == (False, logging.ERROR)
                _ = 1 / 0
            assert (logging.is_progress_bar_enabled(), logging.get_verbosity()) == (bars, level)
    finally:
        logging.set_verbosity(before[0])
        (logging.enable_progress_bar if before[1] else logging.disable_progress_bar)()


def test_threads_that_silence_the_libraries_leave_them_as_talkative_as_they_were():
    """The first to begin is the first to end: what the second found is not put back."""
    from transformers.utils import logging as theirs

    from leansurgeon.architectures.infer.library import quietly

    def state():
        return theirs.get_verbosity(), theirs.is_progress_bar_enabled(), logging.root.manager.disable, sys.stdout

    before, begun, ended = state(), threading.Event(), threading.Event()

    def first():
        with quietly():
            assert begun.wait(20)
        ended.set()

    thread = threading.Thread(target=first)
    thread.start()
    while state() == before:
        time.sleep(0.01)
    with quietly():
        begun.set()
        assert ended.wait(20)
        assert theirs.get_verbosity() == logging.ERROR and logging.root.manager.disable == logging.CRITICAL
    thread.join()
    assert state() == before
