"""Processes that the command starts: they give what one gives, and one that fails is one sentence."""

import errno
import os
import pickle
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from leansurgeon import errors
from leansurgeon.checkpoints.record import DamagedRecord
from leansurgeon.training import together
from leansurgeon.training.processes import launch, worker
from leansurgeon.training.processes.agree import as_all_raise
from leansurgeon.training.recipe.reading import load_training
from tests import conftest
from tests.support import training_interrupted as cut
from tests.support.processes.forks import forked
from tests.support.training_standin import recipe

ROOT = Path(__file__).parents[3]


def _be_worker(folder: str) -> None:
    sys.exit(worker.main(Path(folder)))


def test_two_workers_do_the_training_that_was_asked_for(tmp_path, monkeypatch):
    """The workers are forks here; how torch's launcher starts them is looked at below."""
    conftest.build("vit", num_hidden_layers=1).save_pretrained(tmp_path / "model")
    wanted = load_training("digits-vit", ["train.duration=2st", "train.seed=5", "measure=null"])

    def run_workers(count: int, command: list[str]) -> bool:
        return cut.processes(count, _be_worker, command[-1]) == [0] * count

    monkeypatch.setattr(launch, "run_workers", run_workers)
    found = together.train_on(2, wanted, tmp_path / "model", tmp_path / "run", cpu=True, say=lambda text: None)
    assert (found.world_size, found.steps, found.seed) == (2, 2, 5)
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_a_failed_worker_is_one_sentence_with_its_exit_code(tmp_path):
    def work():
        os.environ["LEANSURGEON_CACHE"] = str(tmp_path)
        try:
            asked = recipe(batch=15), tmp_path / "model", tmp_path / "run"
            together.train_on(2, *asked, cpu=True, say=lambda text: None)
        except errors.LeanSurgeonError as error:
            print(error.exit_code, error.message)

    done = forked(work, ROOT)
    assert re.search(r"^2 .*\bbatch of 15\b.*\b2 processes\b", done.stdout), (done.stdout, done.stderr)
    assert len(done.stdout.splitlines()) == 1
    assert "Traceback" not in done.stderr and "elastic" not in done.stderr


ERRORS = {
    "a deleted run folder": errors.RunFolderReplaced("The run folder was deleted.", "Start again."),
    "a refused request": errors.UsageError("No.", "Yes."),
    "a class of a room": DamagedRecord("It is damaged."),
    "a full disk": OSError(errno.ENOSPC, "No space left on device"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_every_process_ends_as_one_does(name, tmp_path, monkeypatch):
    error = ERRORS[name]
    alone = errors.in_words(error)
    elsewhere = pickle.loads(pickle.dumps(as_all_raise(error)))  # in the processes where nothing failed

    def fail(*_):
        raise error

    monkeypatch.setattr(worker, "_work", fail)
    code = worker.main(tmp_path)
    started = launch.read_verdict(tmp_path, tmp_path / "run")  # in the command that started them
    for one in (elsewhere, started):
        assert (one.message, one.hint, one.exit_code) == (alone.message, alone.hint, alone.exit_code)
        assert isinstance(alone, type(one))
    assert elsewhere.agreed
    assert code == alone.exit_code and not list(tmp_path.glob("*.log"))
    assert isinstance(elsewhere, errors.RunFolderReplaced) == (name == "a deleted run folder")


def test_more_gpus_than_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(errors.UsageError, match=r"\b4\b.*\b1\b"):
        launch.check_gpus(4)


def test_a_worker_never_starts_workers(tmp_path, monkeypatch):
    group = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in group.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(together, "train", lambda *arguments, **options: "trained here")
    assert together.train_on(4, recipe(), tmp_path, tmp_path / "run") == "trained here"


def test_a_command_begins_with_its_process():
    code = "import time; time.sleep(0.4); from leansurgeon import clock; print(time.perf_counter() - clock.began()); "
    code += "clock.mark(); print(time.perf_counter() - clock.began())"
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    unmarked, marked = map(float, done.stdout.split())
    assert unmarked < 0.35 < marked < time.monotonic() - start + 0.05
