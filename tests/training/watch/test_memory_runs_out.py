"""Memory that runs out is exit code 4 wherever it does, and the run folder is let go."""

import pytest
import torch

from leansurgeon.errors import LeanSurgeonError, OutOfMemory
from leansurgeon.training import state
from leansurgeon.training.optimizer import Trainer
from leansurgeon.training.runs import folder as runfolder
from tests.support.training_standin import StandIn, Words, run_training, word_model

SHORT = {
    "device": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cublas-not-made": RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    "cpu": RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: 8 bytes"),
    "python": MemoryError(),
    "fork": OSError(12, "Cannot allocate memory"),
    "c++": RuntimeError("std::bad_alloc"),
}


def raising(error):
    def fail(*arguments, **options):
        raise error

    return fail


@pytest.mark.parametrize("kind", SHORT)
def test_in_a_step(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "step", raising(SHORT[kind]))
    with pytest.raises(OutOfMemory) as error:
        run_training(tmp_path)
    assert error.value.exit_code == 4 and "micro batch of 16" in error.value.message
    assert "train.micro_batch=8" in error.value.hint and not runfolder.is_held(tmp_path / "run")


def test_while_the_model_moves(tmp_path):
    loaded = word_model()
    loaded.model.to = raising(SHORT["device"])
    with pytest.raises(OutOfMemory):
        run_training(tmp_path, loaded=loaded)
    assert not (tmp_path / "run").exists()


def test_while_a_model_is_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(StandIn, "save", raising(SHORT["cpu"]))
    with pytest.raises(LeanSurgeonError) as error:
        run_training(tmp_path)
    assert error.value.exit_code == 4 and not runfolder.is_held(tmp_path / "run")


def test_what_else_goes_wrong_keeps_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "step", raising(RuntimeError("shapes differ")))
    with pytest.raises(RuntimeError, match="shapes differ"):
        run_training(tmp_path)
    assert not runfolder.is_held(tmp_path / "run")


def test_the_folder_is_let_go_where_a_checkpoint_cannot_be_taken_up(tmp_path, monkeypatch):
    class Impatient(Words):
        left = 5

        def batch(self, split, indices, **rest):
            self.left -= split == "train"
            if self.left < 0:
                raise KeyboardInterrupt
            return super().batch(split, indices, **rest)

    every = {"checkpoint": {"every": "2st"}}
    with pytest.raises(KeyboardInterrupt):
        run_training(tmp_path, task=Impatient(), **every)
    with monkeypatch.context() as changed, pytest.raises(OutOfMemory):
        changed.setattr(state, "restore", raising(MemoryError()))
        run_training(tmp_path, resume="auto", **every)
    assert not runfolder.is_held(tmp_path / "run")
    assert run_training(tmp_path, resume="auto", **every).resumed_after == (4,)
