"""Processes that the command starts: they give what one gives, and one that fails is one sentence."""

from __future__ import annotations

import errno
import json
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


def test_two_processes_give_the_losses_and_rates_of_one(tmp_path, monkeypatch):
    """The workers are forks here; how torch's launcher starts them is looked at below."""
    conftest.build("vit", initializer_range=0.02).save_pretrained(tmp_path / "model")
    sets = ["train.duration=4st", "train.log_every=1", "train.eval.every=2st", "train.eval.batch=90", "measure=null"]
    wanted = load_training("digits-vit", sets)

    def run_workers(count: int, command: list[str]) -> bool:
        return cut.processes(count, _be_worker, command[-1]) == [0] * count

    monkeypatch.setattr(launch, "run_workers", run_workers)
    rows = []
    for count in (1, 2):
        run = tmp_path / str(count)
        found = together.train_on(count, wanted, tmp_path / "model", run, cpu=True, say=lambda text: None)
        assert found.world_size == count and found.steps == 4
        rows.append([json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()])
    for a, b in zip(*rows, strict=True):
        assert [a.get(key) for key in ("step", "lr", "samples")] == [b.get(key) for key in ("step", "lr", "samples")]
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
        assert a.get("grad_norm") == pytest.approx(b.get("grad_norm"), abs=1e-5)


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
    "divergence": errors.Diverged("nan"),
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
