"""Batches made by processes of their own: the same training, the same after an interruption, and their end."""

import multiprocessing
import os
import pickle
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from leansurgeon.errors import LeanSurgeonError, UsageError
from leansurgeon.training import data_loader
from leansurgeon.training.data_loader import FirstSamples, SpreadSamples
from leansurgeon.training.optimizer import Trainer
from leansurgeon.training.preview import Synthetic
from tests.support import training_interrupted as cut
from tests.support.training_standin import Words, run_training


def _run(folder, workers, resume="never", kill_at=None, number=cut.KILL, method="fork") -> None:
    """The training with everything in it; rank `kill_at[0]` gets the signal before step `kill_at[1]`."""
    multiprocessing.set_start_method(method, force=True)
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
    folders = {count: tmp_path_factory.mktemp(f"alone{count}") for count in (1, 2)}
    for count, folder in folders.items():
        assert cut.processes(count, _run, folder, 0) == [0] * count
    return folders


# processes, (rank, step from 0), signal, exit code of that rank, how Python would start processes, workers afterwards;
# an epoch has 4 steps, a checkpoint comes every 3. Python 3.14 has another way than those before it: a server's
# children know neither what this process has opened nor which signals it holds back.
CASES = {
    "one-sigterm-then-none": (1, (0, 10), cut.TERM, 75, "spawn", 0),
    "two-sigusr1": (2, (1, 5), cut.USR1, 75, "forkserver", 2),
}


@pytest.mark.parametrize("case", CASES)
def test_with_workers_it_goes_on_as_if_nothing_had_been(case, alone, tmp_path):
    count, kill_at, number, code, method, then = CASES[case]
    codes = cut.processes(count, _run, tmp_path, 2, "never", kill_at, number, method)
    assert codes[kill_at[0]] == code and 0 not in codes
    assert not (tmp_path / "run" / "summary.json").exists()
    assert cut.processes(count, _run, tmp_path, then, "auto") == [0] * count
    cut.assert_same(tmp_path, alone[count])


class Whoever(Words):
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


def others_that_ended(folder: Path) -> int:
    """How many processes but this one have made a batch, when all of them have ended."""
    numbers = {int(file.name.removeprefix("made-")) for file in folder.glob("made-*")} - {os.getpid()}
    end = time.monotonic() + 30
    while any(Path(f"/proc/{number}").exists() for number in numbers):
        assert time.monotonic() < end, "a worker is left"
        time.sleep(0.05)
    return len(numbers)


def test_batches_come_from_other_processes_that_end(tmp_path):
    run_training(tmp_path, task=Whoever(tmp_path), workers=2, duration="2st")
    assert others_that_ended(tmp_path) >= 2  # training alone has two; the evaluations have theirs


SAID = {
    "refused": (UsageError, "picture.jpg cannot be read"),
    "broken": (LeanSurgeonError, r"\bdata worker\b.*\bValueError: broken\b"),
    "killed": (LeanSurgeonError, r"\bdata worker\b.*\bkilled\b"),
}


@pytest.mark.parametrize("harm", SAID)
def test_a_worker_that_fails_or_dies_is_one_sentence(harm, tmp_path):
    kind, said = SAID[harm]
    with pytest.raises(kind, match=said) as error:
        run_training(tmp_path, task=Whoever(tmp_path, harm), workers=2)
    assert "\n" not in str(error.value)
    if harm == "broken":  # without workers the error comes with its own traceback
        assert "--set train.workers=0" in error.value.hint
        with pytest.raises(ValueError, match="broken"):
            run_training(tmp_path / "advised", task=Whoever(tmp_path, harm), workers=0)
    del error
    assert others_that_ended(tmp_path)


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


@pytest.mark.parametrize("task", [FirstSamples(SpreadSamples(Words(), 5), 32, 3), Synthetic(Words())])
def test_a_task_that_stands_for_another_one_travels_to_workers_that_are_spawned(task):
    again = pickle.loads(pickle.dumps(task))
    assert (again.size("train"), again.size("eval"), again.name) == (task.size("train"), task.size("eval"), "words")
    with pytest.raises(AttributeError):
        _ = again.nothing_of_the_kind
