"""Blocks that a training leaves alone, and how many of them healing leaves alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from leansurgeon.checkpoints import model as checkpoints
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UsageError
from leansurgeon.training import regularize
from leansurgeon.training.recipe import from_model, teacher
from tests.support.command_line import leansurgeon
from tests.support.models import strangers

AMX = from_model.Machine(gpu=False, memory=2**34, bf16=True)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return strangers.model(tmp_path_factory.mktemp("own") / "source", "llama", num_hidden_layers=6)


def cut(folder, source, *how):
    done = leansurgeon("shrink", source, *how, "--uncalibrated", "--no-proof", "-o", folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_blocks_before_the_cut_stay_as_they_are(tmp_path, source):
    """Layer 3 of 6 goes: block 2 stands for it, and those before it are the teacher's own."""
    lean, data = cut(tmp_path / "lean", source, "--keep", "0,1,2,4,5"), strangers.texts(tmp_path / "texts")
    done = strangers.healed(lean, data, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "frozen_blocks: 2" in (tmp_path / "run" / "recipe.yaml").read_text()
    before, after = (dict(checkpoints.load(p).model.named_parameters()) for p in (lean, tmp_path / "run" / "last"))
    same = {name for name in before if torch.equal(before[name], after[name])}
    early = {name for name in before if "embed" in name or any(f"layers.{i}." in name for i in (0, 1))}
    assert same == early and len(before) > len(early) > 10


def test_something_must_be_left_to_train(source):
    with pytest.raises(UsageError, match="frozen_blocks=5"):
        regularize.freeze_blocks(checkpoints.load(source), 6)


@pytest.mark.parametrize(
    ("kept", "wanted"),
    [((0, 1, 2, 4, 5), 2), ((0, 2, 4, 5), 0), ((1, 2, 3, 4, 5), 0), ((0, 1, 2, 3, 4), 2), ((0, 1, 2, 3), 2), ((0,), 0)],
)
def test_blocks_in_front_of_the_first_gap_need_no_healing(kept, wanted, tmp_path, source):
    lean = cut(tmp_path / "lean", source, "--keep", ",".join(map(str, kept)))
    assert teacher.count_untouched(open_source(str(lean))) == wanted


def test_a_model_whose_heads_changed_is_healed_whole(tmp_path, source):
    lean = open_source(str(cut(tmp_path / "lean", source, "--keep", "0,1,2,4,5", "--heads", "8")))
    assert teacher.count_untouched(lean) == 0
    assert teacher.count_untouched(open_source(str(source))) == 0


def test_what_is_typed_is_not_lowered(source, tmp_path):
    lean = open_source(str(cut(tmp_path / "lean", source, "--keep", "0,1,2,4,5")))
    found = teacher.Teacher("source", "x", own=True)

    def made(**asked):
        return from_model.settings(lean, "causal-lm", 10_000, 64, found, from_model.RecipeInputs(**asked))

    assert made()["optim"]["full_steps"] == from_model.FEW
    assert "full_steps" not in made(sets=("train.optim.lr=1e-3",))["optim"]
    assert made()["frozen_blocks"] == 2 and "frozen_blocks" not in made(lora=4)


def test_wide_models_are_multiplied_in_bf16_where_the_processor_does_it(source):
    narrow = open_source(str(source))
    stage = replace(narrow.shape.stages[0], width=576)
    wide = type("Wide", (), {"shape": replace(narrow.shape, stages=(stage,))})
    assert from_model.choose_precision(narrow, AMX) == "fp32" and from_model.choose_precision(wide, AMX) == "bf16"
    assert from_model.choose_precision(wide, replace(AMX, bf16=False)) == "fp32"
    assert from_model.choose_precision(narrow, replace(AMX, gpu=True)) == "bf16"


@pytest.mark.parametrize(("seconds", "samples"), [(None, 4), (1200.0, 4), (120.0, 1), (5.0, 1)])
def test_a_short_training_takes_small_steps(seconds, samples):
    """SmolLM2-135M has 106e6 parameters in matrices; windows of 256 tokens."""
    assert from_model.choose_batch("causal-lm", 106_000_000, 256, AMX, 9_000, seconds) == samples
    short = from_model.choose_batch("sequence-classification", 106_000_000, 128, AMX, 9_000, seconds)
    assert short == {None: 32, 1200.0: 16, 120.0: 2, 5.0: 1}[seconds]
