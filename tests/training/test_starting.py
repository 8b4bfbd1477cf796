"""What a checkpoint brings with it: tokenizer, processor and precision are its own, whatever a recipe says."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.support.command_line import leansurgeon
from tests.support.models import strangers

STEPS = ("--set", "train.duration=2st", "--set", "train.batch=4", "--set", "measure=null")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LEANSURGEON_CACHE", str(tmp_path / "cache"))


def recipe(folder, **task):
    file = folder / "recipe.yaml"
    file.write_text(
        "version: 1\nname: own\nkind: training\n"
        f"task: {json.dumps(task)}\ntrain: {{duration: 2st, batch: 4, optim: {{lr: 1e-3}}}}\nmeasure: null\n"
    )
    return file


def test_another_tokenizer_is_refused_for_learned_embeddings(tmp_path):
    """The model speaks single words; an own vocabulary of characters would train on without a word."""
    data = strangers.texts(tmp_path / "texts")
    source = strangers.model(tmp_path / "own", "llama")
    named = recipe(tmp_path, name="causal-lm", data=str(data), seq_len=32, tokenizer="char")
    done = leansurgeon("retrain", source, "-r", named, "-o", tmp_path / "run")
    assert done.returncode == 2 and "--new-tokenizer" in done.stderr and not (tmp_path / "run").exists()
    # What the sentence says helps, both ways.
    for number, more in enumerate((["--set", "task.tokenizer=model"], ["--new-tokenizer"])):
        done = leansurgeon("retrain", source, "-r", named, "-o", tmp_path / f"run-{number}", *more)
        assert done.returncode == 0, done.stderr


def test_embeddings_start_anew_for_a_new_tokenizer(tmp_path):
    import transformers

    data = strangers.texts(tmp_path / "texts")
    source = strangers.model(tmp_path / "own", "llama")
    done = strangers.healed(source, data, tmp_path / "run", "--new-tokenizer", "--set", "train.optim.lr=1e-12")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "run" / "model"
    model, tokenizer = (
        auto.from_pretrained(folder) for auto in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer)
    )
    before, after = load_file(source / "model.safetensors"), model.state_dict()
    assert tokenizer.get_vocab() != transformers.AutoTokenizer.from_pretrained(source).get_vocab()
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert len(after["model.embed_tokens.weight"]) == model.config.vocab_size >= len(tokenizer)
    kept = [name for name in before if "embed" not in name and "lm_head" not in name]
    assert kept and all(torch.allclose(before[name], after[name], atol=1e-6) for name in kept)
    same = before["model.embed_tokens.weight"][: model.config.vocab_size]
    assert not torch.allclose(same, after["model.embed_tokens.weight"][: len(same)], atol=1e-3)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path):
    source = strangers.model(tmp_path / "own", "llama", vocab_size=40)
    done = strangers.healed(source, strangers.texts(tmp_path / "texts"), tmp_path / "run")
    assert done.returncode == 2 and "61" in done.stderr and "40" in done.stderr


def test_images_get_the_size_that_the_model_takes(tmp_path):
    data = strangers.pictures(tmp_path / "images")
    source = strangers.model(tmp_path / "own", "vit", num_channels=3, num_labels=2, id2label={0: "ant", 1: "bee"})
    strangers.processor(source, 8, 3)
    named = recipe(tmp_path, name="folder", data=str(data), image_size=224)
    done = leansurgeon("retrain", source, "-r", named, "-o", tmp_path / "run")
    assert done.returncode == 0 and "224" in done.stderr
    from leansurgeon.training.recipe.reading import load_training
    from leansurgeon.training.setup import prepare_task

    task = prepare_task(load_training(str(named)), source, lambda text: None)
    assert (task.options.image_size, task.options.mean, task.options.std) == (8, [0.3] * 3, [0.2] * 3)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_bf16_model_comes_back_in_bf16_and_trains_in_fp32(tmp_path, family):
    """A rate so small that bf16 weights would not move at all; the masters do, and tied tensors stay one."""
    from leansurgeon.checkpoints import model as checkpoints

    made = strangers.build(family).to(torch.bfloat16)
    made.save_pretrained(tmp_path / "own")
    strangers.words(tmp_path / "own")
    done = strangers.healed(tmp_path / "own", strangers.texts(tmp_path / "texts"), tmp_path / "run", "--resume", "auto")
    assert done.returncode == 0, done.stderr
    before, after = (load_file(p / "model.safetensors") for p in (tmp_path / "own", tmp_path / "run" / "model"))
    assert before.keys() == after.keys()
    assert {name: t.dtype for name, t in after.items()} == {name: t.dtype for name, t in before.items()}
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert json.loads((tmp_path / "run/model/config.json").read_text())["dtype"] == "bfloat16"
    loaded = checkpoints.load(tmp_path / "own")
    assert next(loaded.model.parameters()).dtype == torch.float32
    # Saved again without training, it is bit for bit what it was.
    loaded.save(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(before[name], again[name]) for name in before)


def test_a_cpu_trains_in_fp32_and_says_so_once(tmp_path):
    import yaml

    source = strangers.model(tmp_path / "own", "llama")
    wish = ("--set", "train.precision=fp16", "--set", "train.compile=true", "--cpu-processes", "1")
    done = strangers.healed(source, strangers.texts(tmp_path / "texts"), tmp_path / "run", *wish)
    assert done.returncode == 0, done.stderr
    assert sum("fp16" in line and "There is no GPU" in line for line in done.stderr.splitlines()) == 1
    train = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())["train"]
    assert (train["precision"], train["compile"]) == ("fp32", False)


def test_a_new_head_is_made_where_the_task_names_no_classes(tmp_path):
    source = tmp_path / "cut"
    assert leansurgeon("shrink", "digits-vit", "--layers", "2", "-o", source, "--no-proof").returncode == 0
    head = ("--set", "train.new_head=true", "--limit-batches", "2")
    done = leansurgeon("retrain", source, "-r", "digits-vit", "-o", tmp_path / "run", *STEPS, *head)
    assert done.returncode == 0, done.stderr
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "run" / "last"))
    names = [name for name in before if "head" in name or "classifier" in name]
    assert names and all(before[name].shape == after[name].shape for name in names)
