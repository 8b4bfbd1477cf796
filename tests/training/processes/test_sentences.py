"""Several processes end with the sentence and the exit code with which one does, whatever it was."""

from __future__ import annotations

import errno
import json
import pickle

import pytest

from leansurgeon import errors
from leansurgeon.checkpoints.record import DamagedRecord
from leansurgeon.training.processes import worker
from leansurgeon.training.processes.agree import as_all_raise
from leansurgeon.training.processes.launch import JOB, read_verdict
from leansurgeon.training.processes.worker import main

ERRORS = {
    "a deleted run folder": errors.RunFolderReplaced("The run folder was deleted.", "Start again."),
    "a refused request": errors.UsageError("No.", "Yes."),
    "a class of a room": DamagedRecord("It is damaged."),
    "a full disk": OSError(errno.ENOSPC, "No space left on device"),
    "a shut folder": PermissionError(errno.EACCES, "Permission denied", "/shut"),
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
    (tmp_path / JOB).write_text(json.dumps({}))
    code = main(tmp_path)
    started = read_verdict(tmp_path, tmp_path / "run")  # in the command that started them
    for one in (elsewhere, started):
        assert (one.message, one.hint, one.exit_code) == (alone.message, alone.hint, alone.exit_code)
        assert isinstance(alone, type(one))
    assert elsewhere.agreed
    assert code == alone.exit_code and not list(tmp_path.glob("*.log"))
    assert isinstance(elsewhere, errors.RunFolderReplaced) == (name == "a deleted run folder")
