"""Batches made by processes of their own: the same training, the same after an interruption, and their end."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from leansurgeon.errors import LeanSurgeonError, UsageError
from leansurgeon.training import data_loader
from leansurgeon.training.loop import train
from leansurgeon.training.optimizer import Trainer
from tests.support import training_interrupted as cut
from tests.support.training_standin import Words, recipe, word_model


def _run(folder, workers, resume="never", kill_at=None, number=cut.KILL) -> None:
    """The training with everything in it; rank `kill_at[0]` gets the signal before step `kill_at[1]`."""
    if kill_at is not None and int(os.environ.get("RANK", "0")) == kill_at[0]:
        real = Trainer.step

        def step(self, at, batches):
            if at == kill_at[1]:
                os.kill(os.getpid(), number)
            return real(self, at, batches)

        Trainer.step = step
    try:
        cut.run(folder, resume=resume, workers=workers)
    except LeanSurgeonError as error:
        os._exit(error.exit_code)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Nobody interrupts it, and no worker helps, on 1 and 2 processes."""
    folders = {}
    for count in (1, 2):
        folders[count] = tmp_path_factory.mktemp(f"alone{count}")
        assert cut.processes(count, _run, folders[count], 0) == [0] * count
    return folders


def _same(one, other) -> None:
    assert cut.told(one) == cut.told(other)
    assert cut.numbers(one) == cut.numbers(other)
    for name in ("model", "last"):
        a, b = cut.weights(one, name), cut.weights(other, name)
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a), name


@pytest.mark.parametrize("count", [1, 2])
def test_two_workers_give_every_number_that_none_gives(count, alone, tmp_path):
    assert cut.processes(count, _run, tmp_path, 2) == [0] * count
    _same(tmp_path, alone[count])


def _started_as(method, folder) -> None:
    multiprocessing.set_start_method(method, force=True)
    _run(folder, 2, kill_at=(0, 10), number=cut.TERM)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_how_python_would_start_processes_makes_no_difference(method, alone, tmp_path):
    """Python 3.14 has another way than those before it: a server's children know neither what this process has opened
    nor which signals it holds back, and a task would have to be pickled for them.
    """
    assert cut.processes(1, _started_as, method, tmp_path) == [75]
    assert cut.processes(1, _run, tmp_path, 2, "auto") == [0]
    _same(tmp_path, alone[1])


# processes, (rank, step from 0), signal, exit code of that rank; an epoch has 4 steps, a checkpoint comes every 3
CASES = {
    "one-killed-mid-epoch": (1, (0, 10), cut.KILL, -9),
    "one-sigterm": (1, (0, 10), cut.TERM, 75),
    "two-killed-mid-epoch": (2, (1, 10), cut.KILL, -9),
    "two-sigusr1": (2, (1, 5), cut.USR1, 75),
}


SLOW = ("one-sigterm", "two-killed-mid-epoch")  # nearly what the other two show


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in CASES])
def test_with_workers_it_goes_on_as_if_nothing_had_been(case, alone, tmp_path):
    count, kill_at, number, code = CASES[case]
    codes = cut.processes(count, _run, tmp_path, 2, "never", kill_at, number)
    assert codes[kill_at[0]] == code and 0 not in codes
    assert not (tmp_path / "run" / "summary.json").exists()
    assert cut.processes(count, _run, tmp_path, 2, "auto") == [0] * count
    _same(tmp_path, alone[count])


def test_how_many_workers_there_are_may_change_on_the_way(alone, tmp_path):
    assert cut.processes(1, _run, tmp_path, 2, "never", (0, 10), cut.TERM) == [75]
    assert cut.processes(1, _run, tmp_path, 0, "auto") == [0]
    _same(tmp_path, alone[1])


class _Whoever(Words):
    """Leaves the number of the process that makes a batch; `harm` comes with the batch that holds sample 5."""

    def __init__(self, folder: Path, harm: str | None = None) -> None:
        super().__init__()
        self._folder, self._harm = folder, harm

    def batch(self, split, indices, *, seed, epoch):
        (self._folder / f"made-{os.getpid()}").touch()
        if self._harm and split == "train" and 5 in indices:
            if self._harm == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise UsageError("picture.jpg cannot be read.") if self._harm == "refused" else ValueError("broken")
        return super().batch(split, indices, seed=seed, epoch=epoch)


def _gone(folder: Path) -> bool:
    """Whether no process that made a batch is left but this one."""
    numbers = {int(file.name.removeprefix("made-")) for file in folder.glob("made-*")} - {os.getpid()}
    end = time.monotonic() + 10
    while any(Path(f"/proc/{number}").exists() for number in numbers):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return bool(numbers)


def test_batches_come_from_other_processes_that_end(tmp_path, monkeypatch, recwarn):
    said = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    options = {"loaded": word_model(), "task": _Whoever(tmp_path), "cpu": True, "say": said.append}
    train(recipe(workers=2, duration="2st"), tmp_path, tmp_path / "run", **options)
    made_by = {int(file.name.removeprefix("made-")) for file in tmp_path.glob("made-*")}
    assert len(made_by - {os.getpid()}) >= 2  # training alone has two; the evaluations have theirs
    assert _gone(tmp_path)
    assert len([line for line in said if re.search(r"\b2 data workers\b.*\b1 core\b", line, re.S)]) == 1
    assert not any("DataLoader" in str(warning.message) for warning in recwarn)


SAID = {
    "refused": (UsageError, "picture.jpg cannot be read"),
    "broken": (LeanSurgeonError, r"\bdata worker\b.*\bValueError: broken\b"),
    "killed": (LeanSurgeonError, r"\bdata worker\b.*\bkilled\b"),
}


@pytest.mark.parametrize("harm", SAID)
def test_a_worker_that_fails_or_dies_is_one_sentence(harm, tmp_path):
    kind, said = SAID[harm]
    options = {"loaded": word_model(), "task": _Whoever(tmp_path, harm), "cpu": True, "say": lambda text: None}
    with pytest.raises(kind, match=said) as error:
        train(recipe(workers=2), tmp_path, tmp_path / "run", **options)
    assert "\n" not in str(error.value)
    del error
    assert _gone(tmp_path)


def test_a_signal_to_all_does_not_reach_the_workers():
    """A scheduler or Ctrl-C signals the whole group; the training still needs the batches of the step it is in. So it
    is from the moment a worker exists: these have hardly been forked.
    """
    rows = [(0, np.arange(4)) for _ in range(64)]
    mask, before = signal.pthread_sigmask(signal.SIG_BLOCK, ()), set(multiprocessing.active_children())
    batches = data_loader.make_batches(Words(), "train", rows, seed=0, workers=2)
    children = set(multiprocessing.active_children()) - before
    for child in children:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            os.kill(child.pid, number)
    assert len(children) == 2 and len(list(batches)) == 64
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask  # this process hears as before


def test_workers_leave_the_generators_alone():
    before = torch.get_rng_state()
    list(data_loader.make_batches(Words(), "train", [(0, np.arange(4))], seed=0, workers=1))
    assert torch.equal(torch.get_rng_state(), before)
