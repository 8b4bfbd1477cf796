"""Blocks that a training leaves alone, and how many of them healing leaves alone."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from leansurgeon.checkpoints import model as checkpoints
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UsageError
from leansurgeon.reading.cache_folder import cache_folder
from leansurgeon.tasks import user_data
from leansurgeon.training import distill, distributed, regularize, schedule, setup, starting
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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("kind", "head"), [("llama", "causal-lm"), ("encoder", "sentences")])
def test_what_both_have_in_common_runs_once_and_moves_no_bit(tmp_path, source, kind, head, precision, monkeypatch):
    """Loss and gradients of a step, with the common blocks run once and the teacher's matrices in bf16, and without."""
    origin = source if kind == "llama" else strangers.encoder(tmp_path / "enc", num_hidden_layers=6)
    lean = cut(tmp_path / "lean", origin, "--keep", "0,1,2,4,5")
    data = str(strangers.texts(tmp_path / "texts"))
    asked = from_model.RecipeInputs(data=data, sets=(f"train.precision={precision}",))
    recipe = from_model.make_recipe(lean, user_data.recognise(data), asked, cache_folder(), print)
    assert recipe.task.name == head and recipe.train.frozen_blocks == 2

    def step(*, plain: bool):
        if plain:
            monkeypatch.setattr(distill, "count_common", lambda *_: 0)
            monkeypatch.setattr(distill, "halve_matrices", lambda *_: None)
        task = setup.prepare_task(recipe, lean, print)
        accelerator = distributed.start_accelerator(cpu=True, train=recipe.train, say=print)
        loaded = starting.load_start(recipe, lean, task)
        scheme = schedule.make_plan(recipe.train, task.size("train"), 1)
        trainer, judged = setup.make_trainer(loaded, task, accelerator, scheme, lean)
        runs = []
        for block in judged.teacher.teacher.blocks[:2] + loaded.blocks[:2]:
            block.register_forward_pre_hook(lambda *_: runs.append(1))
            inner = next(module for module in block.modules() if isinstance(module, torch.nn.Linear))
            inner.register_forward_hook(lambda *_: runs.append(2))
        batch = task.batch("train", np.arange(scheme.batch), seed=0, epoch=0)
        sums = trainer.scored(batch)
        sums.loss_sum.backward()
        judged.eval()
        with torch.no_grad():
            after = judged(batch).loss_sum
        return [sums.loss_sum, after, *(p.grad for p in trainer.parameters if p.grad is not None)], runs.count(2)

    once, twice = step(plain=False), step(plain=True)
    assert all(torch.equal(a, b) for a, b in zip(once[0], twice[0], strict=True)) and len(once[0]) > 20
    assert once[1] < twice[1]


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


def test_a_model_whose_heads_changed_keeps_only_its_embeddings(tmp_path, source):
    lean = open_source(str(cut(tmp_path / "lean", source, "--keep", "0,1,2,4,5", "--heads", "8")))
    assert teacher.count_untouched(lean) == 0
    assert teacher.count_untouched(open_source(str(source))) is None


def test_no_frozen_blocks_freeze_what_is_before_them(source):
    loaded = checkpoints.load(source)
    regularize.freeze_blocks(loaded, 0)
    fixed = {name for name, one in loaded.model.named_parameters() if not one.requires_grad}
    assert fixed == {"model.embed_tokens.weight"}


def test_what_is_typed_is_not_lowered(source, tmp_path):
    lean = open_source(str(cut(tmp_path / "lean", source, "--keep", "0,1,2,4,5")))
    found = teacher.Teacher("source", "x", own=True)

    def made(**asked):
        return from_model.settings(lean, "causal-lm", 10_000, 64, found, from_model.RecipeInputs(**asked))

    assert made()["optim"]["full_steps"] == from_model.FEW
    assert "full_steps" not in made(sets=("train.optim.lr=1e-3",))["optim"]
    assert made()["frozen_blocks"] == 2 and made()["frozen_embeddings"]
    assert not {"frozen_blocks", "frozen_embeddings"} & made(lora=4).keys()


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


def test_positions_that_all_blocks_share_stay_the_students_own(tmp_path):
    """MPNet names its shared relative positions behind the layers: they learn, so blocks that get them run."""
    config = transformers.MPNetConfig(
        hidden_size=24, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48, vocab_size=61
    )
    teacher, student = (transformers.MPNetModel(config).eval() for _ in range(2))
    student.load_state_dict(teacher.state_dict())
    loaded = [SimpleNamespace(model=model, blocks=list(model.encoder.layer)) for model in (student, teacher)]
    regularize.freeze_blocks(loaded[0], 2)
    common = distill.CommonBlocks(*loaded)
    with torch.no_grad():
        student.encoder.relative_attention_bias.weight += 1.0 * torch.randn(32, 4)
    ids = torch.arange(12).view(2, 6) + 3
    student.train()
    regularize.set_dropout(student, 0.0, "MPNet")
    alone = student(input_ids=ids)[0]
    with common:
        with torch.no_grad():
            teacher(input_ids=ids)
        beside = student(input_ids=ids)[0]
    assert torch.equal(alone, beside) and "forward" not in vars(student.encoder.layer[0])


def test_statistics_of_what_is_frozen_do_not_move():
    norm, block = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4)
    model = torch.nn.ModuleDict({"stem": norm, "block": block})
    regularize.freeze_blocks(SimpleNamespace(model=model, blocks=[block]), 0)
    copy.deepcopy(model).train()
    model.train()
    model["stem"](torch.randn(8, 4) + 5)
    assert not norm.training and float(norm.running_mean.abs().sum()) == 0 and block.training


def test_a_final_norm_that_is_named_first_is_trained():
    config = transformers.OPTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48, vocab_size=61, word_embed_proj_dim=24
    )
    model = transformers.OPTForCausalLM(config)
    regularize.freeze_blocks(SimpleNamespace(model=model, blocks=list(model.model.decoder.layers)), 0)
    assert model.model.decoder.final_layer_norm.weight.requires_grad
    assert not model.model.decoder.embed_tokens.weight.requires_grad
