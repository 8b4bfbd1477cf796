"""The environment against the recipe: what is set aside does nothing, what is in force is said, once."""

import os
import re

import pytest
import torch

from leansurgeon.checkpoints import model as checkpoints
from leansurgeon.training import distributed
from leansurgeon.training.processes import launch
from tests import conftest
from tests.support import training_interrupted as cut
from tests.support.training_standin import recipe, run_training

LAUNCHED = {  # what `accelerate launch --use_fsdp --mixed_precision fp16` leaves, in part
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "ACCELERATE_MIXED_PRECISION": "fp16",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
    "ACCELERATE_DYNAMO_BACKEND": "no",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_TORCH_DEVICE": "cpu",
}
FORCING = ("TF32", "FPMATH", "COMPILE", "DYNAMO")


@pytest.fixture
def clean(monkeypatch):
    """No wish of the machine that the tests run on; what a test sets or loses is as before afterwards."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in [n for n in os.environ if n.startswith(launch._ASIDE) or any(word in n for word in FORCING)]:
        del os.environ[name]


def test_what_accelerate_would_obey_is_taken_away_and_named_once(clean):
    os.environ |= LAUNCHED
    told = ["ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"]
    assert launch.set_aside() == told
    assert launch.set_aside() == [] and os.environ["ACCELERATE_TORCH_DEVICE"] == "cpu"
    os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "4"  # more than none
    assert launch.set_aside() == ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"]


COMPILED = {"compile": True}
FORCED = {
    "tf32": ("cuda", {}, "NVIDIA_TF32_OVERRIDE=1", True),
    "tf32-beside-bf16": ("cuda", {"precision": "bf16"}, "NVIDIA_TF32_OVERRIDE=1", False),
    "tf32-on-a-cpu": ("cpu", {}, "NVIDIA_TF32_OVERRIDE=1", False),
    "bf16-products": ("cpu", {}, "ONEDNN_DEFAULT_FPMATH_MODE=BF16", True),
    "all-digits": ("cpu", {}, "ONEDNN_DEFAULT_FPMATH_MODE=STRICT", False),
    "no-compile": ("cuda", COMPILED, "TORCHDYNAMO_DISABLE=1", True),
    "suppressing": ("cuda", COMPILED, "TORCHDYNAMO_SUPPRESS_ERRORS=0", True),  # torch takes any text for yes
    "no-suppressing": ("cuda", COMPILED, "TORCHDYNAMO_SUPPRESS_ERRORS=", False),
    "no-compile-wanted": ("cuda", {}, "TORCHDYNAMO_DISABLE=1", False),
}


@pytest.mark.parametrize("case", FORCED)
def test_only_what_overrides_this_recipe_is_named(case, clean):
    device, settings, said, told = FORCED[case]
    name, _, os.environ[name] = said.partition("=")
    found = launch.list_overrides(recipe(**settings).train, device)
    assert (len(found) == 1 and found[0].startswith(f"{said} (train.")) if told else found == []


def test_a_training_says_in_one_line_what_is_ignored_and_what_is_in_force(clean, tmp_path):
    os.environ |= {"ACCELERATE_MIXED_PRECISION": "fp16", "ONEDNN_DEFAULT_FPMATH_MODE": "BF16"}
    said = []
    run_training(tmp_path, say=said.append, duration="1st")
    (line,) = [text for text in said if "environment" in text]
    assert re.search(r"^Ignored: ACCELERATE_MIXED_PRECISION\b.*\brecipe\b", line)
    assert "ONEDNN_DEFAULT_FPMATH_MODE=BF16 (train.precision)" in line


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
