"""Which process of its group this one is is asked in one place."""

from __future__ import annotations

from pathlib import Path

import pytest

import leansurgeon
from leansurgeon.progress import command_screen
from leansurgeon.rank import is_first_here, is_worker, rank

PACKAGE = Path(leansurgeon.__file__).parent


@pytest.mark.parametrize(
    ("said", "local", "number", "worker", "first"),
    [(None, None, 0, False, False), ("0", "0", 0, True, True), ("3", "0", 3, True, True), ("2", "1", 2, True, False)],
)
def test_the_environment_says_which_process_this_is(monkeypatch, said, local, number, worker, first):
    for name, value in (("RANK", said), ("LOCAL_RANK", local)):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    assert (rank(), is_worker(), is_first_here()) == (number, worker, first)
    assert command_screen().quiet == (number > 0)


def test_what_is_no_number_is_the_first_process(monkeypatch):
    monkeypatch.setenv("RANK", "")
    assert rank() == 0


def test_nobody_else_reads_it():
    readers = {p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py") if 'RANK"' in p.read_text()}
    assert readers == {"rank.py"}
