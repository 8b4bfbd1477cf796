"""Blocks that a training leaves alone, and how many of them healing leaves alone."""

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


@pytest.fixture(scope="module")
def lean(source):
    """Layer 3 of 6 goes: block 2 stands for it, and those before it are the teacher's own."""
    return cut(source.with_name("lean"), source, "--keep", "0,1,2,4,5")


def test_the_blocks_before_the_cut_stay_as_they_are(tmp_path, lean):
    done = strangers.healed(lean, strangers.texts(tmp_path / "texts"), tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "frozen_blocks: 2" in (tmp_path / "run" / "recipe.yaml").read_text()
    before, after = (dict(checkpoints.load(p).model.named_parameters()) for p in (lean, tmp_path / "run" / "last"))
    same = {name for name in before if torch.equal(before[name], after[name])}
    early = {name for name in before if "embed" in name or any(f"layers.{i}." in name for i in (0, 1))}
    assert same == early and len(before) > len(early) > 10


@pytest.mark.parametrize(("kind", "precision"), [("llama", "bf16"), ("encoder", "fp32")])
def test_what_both_have_in_common_runs_once_and_moves_no_bit(tmp_path, lean, kind, precision, monkeypatch):
    """Loss and gradients of a step, with the common blocks run once and the teacher's matrices in bf16, and without."""
    if kind == "encoder":
        encoder = strangers.encoder(tmp_path / "encoder", num_hidden_layers=6)
        lean = cut(tmp_path / "lean", encoder, "--keep", "0,1,2,4,5")
    data = str(strangers.texts(tmp_path / "texts"))
    asked = from_model.RecipeInputs(data=data, sets=(f"train.precision={precision}",))
    recipe = from_model.make_recipe(lean, user_data.recognise(data), asked, cache_folder(), print)
    assert recipe.train.frozen_blocks == 2

    def step():
        """Loss, loss in evaluation and gradients of a step; and how often the common blocks ran."""
        task = setup.prepare_task(recipe, lean, print)
        accelerator = distributed.start_accelerator(cpu=True, train=recipe.train, say=print)
        loaded = starting.load_start(recipe, lean, task)
        scheme = schedule.make_plan(recipe.train, task.size("train"), 1)
        trainer, judged = setup.make_trainer(loaded, task, accelerator, scheme, lean)
        runs = []
        for block in judged.teacher.teacher.blocks[:2] + loaded.blocks[:2]:
            inner = next(module for module in block.modules() if isinstance(module, torch.nn.Linear))
            inner.register_forward_hook(lambda *_: runs.append(1))
        batch = task.batch("train", np.arange(scheme.batch), seed=0, epoch=0)
        sums = trainer.scored(batch)
        sums.loss_sum.backward()
        judged.eval()
        with torch.no_grad():
            after = judged(batch).loss_sum
        return [sums.loss_sum, after, *(p.grad for p in trainer.parameters if p.grad is not None)], len(runs)

    once, runs = step()
    monkeypatch.setattr(distill, "count_common", lambda *_: 0)
    monkeypatch.setattr(distill, "halve_matrices", lambda *_: None)
    twice, more_runs = step()
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True)) and len(once) > 20
    assert runs < more_runs


@pytest.mark.parametrize(
    ("kept", "wanted"),
    [("0,1,2,4,5", 2), ("0,2,4,5", 0), ("1,2,3,4,5", 0), ("0,1,2,3", 2), ("0,1,2,4,5 --heads 8", 0)],
)
def test_blocks_in_front_of_the_first_gap_need_no_healing(kept, wanted, tmp_path, source):
    assert teacher.count_untouched(open_source(str(cut(tmp_path / "lean", source, "--keep", *kept.split())))) == wanted


def test_what_freezing_leaves_to_train(source):
    assert teacher.count_untouched(open_source(str(source))) is None
    loaded = checkpoints.load(source)
    with pytest.raises(UsageError, match="frozen_blocks=5"):
        regularize.freeze_blocks(loaded, 6)
    regularize.freeze_blocks(loaded, 0)
    fixed = {name for name, one in loaded.model.named_parameters() if not one.requires_grad}
    assert fixed == {"model.embed_tokens.weight"}


def test_what_is_typed_is_not_lowered(lean):
    source, found = open_source(str(lean)), teacher.Teacher("source", "x", own=True)

    def made(**asked):
        return from_model.settings(source, "causal-lm", 10_000, 64, found, from_model.RecipeInputs(**asked))

    assert made()["optim"]["full_steps"] == from_model.FEW
    assert "full_steps" not in made(sets=("train.optim.lr=1e-3",))["optim"]
    assert made()["frozen_blocks"] == 2 and made()["frozen_embeddings"]
    assert not {"frozen_blocks", "frozen_embeddings"} & made(lora=4).keys()


def test_wide_models_are_multiplied_in_bf16_where_the_processor_does_it(source):
    narrow = open_source(str(source))
    stage = replace(narrow.shape.stages[0], width=576)
    wide = type("Wide", (), {"shape": replace(narrow.shape, stages=(stage,))})
    slow, gpu = replace(AMX, bf16=False), replace(AMX, gpu=True)
    for model, machine, wanted in (
        (narrow, AMX, "fp32"),
        (wide, AMX, "bf16"),
        (wide, slow, "fp32"),
        (narrow, gpu, "bf16"),
    ):
        assert from_model.choose_precision(model, machine) == wanted


@pytest.mark.parametrize(("seconds", "windows", "texts"), [(None, 4, 32), (1200.0, 4, 16), (120.0, 1, 2), (5.0, 1, 1)])
def test_a_short_training_takes_small_steps(seconds, windows, texts):
    """SmolLM2-135M has 106e6 parameters in matrices; windows of 256 tokens."""
    assert from_model.choose_batch("causal-lm", 106_000_000, 256, AMX, 9_000, seconds) == windows
    assert from_model.choose_batch("sequence-classification", 106_000_000, 128, AMX, 9_000, seconds) == texts


def test_positions_that_all_blocks_share_stay_the_students_own():
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
    model.train()
    norm(torch.randn(8, 4) + 5)
    assert not norm.training and float(norm.running_mean.abs().sum()) == 0 and block.training


def test_a_final_norm_that_is_named_first_is_trained():
    config = transformers.OPTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48, vocab_size=61, word_embed_proj_dim=24
    )
    decoder = transformers.OPTForCausalLM(config).model.decoder
    regularize.freeze_blocks(SimpleNamespace(model=decoder, blocks=list(decoder.layers)), 0)
    assert decoder.final_layer_norm.weight.requires_grad and not decoder.embed_tokens.weight.requires_grad
