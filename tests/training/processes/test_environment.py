"""The environment against the recipe: what is set aside does nothing, and is said once."""

from __future__ import annotations

import os
import re

import pytest
import torch

from leansurgeon.checkpoints import model as checkpoints
from leansurgeon.training import distributed
from leansurgeon.training.processes import launch
from tests import conftest
from tests.support import training_interrupted as cut
from tests.support.training_standin import run_training

LAUNCHED = {  # what `accelerate launch --use_fsdp --mixed_precision fp16` leaves, in part
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "ACCELERATE_MIXED_PRECISION": "fp16",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
    "ACCELERATE_DYNAMO_BACKEND": "no",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_TORCH_DEVICE": "cpu",
}


@pytest.fixture
def clean(monkeypatch):
    """No wish of the machine that the tests run on; what a test sets or loses is as before afterwards."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in [n for n in os.environ if n.startswith(launch._ASIDE)]:
        del os.environ[name]


def test_what_accelerate_would_obey_is_taken_away_and_named_once(clean):
    os.environ |= LAUNCHED
    assert launch.set_aside() == sorted(LAUNCHED.keys() - {"ACCELERATE_TORCH_DEVICE"})
    assert launch.set_aside() == [] and os.environ["ACCELERATE_TORCH_DEVICE"] == "cpu"


def test_a_training_says_in_one_line_what_is_ignored(clean, tmp_path):
    os.environ["ACCELERATE_MIXED_PRECISION"] = "fp16"
    said = []
    run_training(tmp_path, say=said.append, duration="1st")
    (line,) = [text for text in said if "environment" in text]
    assert re.search(r"^Ignored: ACCELERATE_MIXED_PRECISION\b.*\brecipe\b", line)


def _load_on(folder) -> None:
    """A process of a group that starts, and leaves the weights that it would begin with."""
    os.environ |= LAUNCHED
    distributed.start_accelerator(cpu=True)
    torch.manual_seed(0)
    weights = checkpoints.load(folder / "model", "image-classification", {"num_labels": 3}).model.state_dict()
    torch.save(weights, folder / f"{os.environ['RANK']}.pt")


def test_every_process_begins_with_the_same_fresh_head_whatever_launched_it(tmp_path):
    """With these variables transformers would leave a new head without memory on all processes but the first."""
    conftest.build("vit").save_pretrained(tmp_path / "model")
    assert cut.processes(2, _load_on, tmp_path) == [0, 0]
    one, other = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert one["classifier.weight"].shape[0] == 3
    assert all(torch.equal(one[name], other[name]) for name in one)
