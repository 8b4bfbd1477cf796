"""What a checkpoint brings with it: tokenizer, processor and precision are its own, whatever a recipe says."""

import json

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file

from leansurgeon.checkpoints import model as checkpoints
from leansurgeon.training.recipe.reading import load_training
from leansurgeon.training.setup import prepare_task
from tests.support.command_line import leansurgeon
from tests.support.models import strangers


@pytest.fixture
def texts(tmp_path):
    return strangers.texts(tmp_path / "texts")


pytestmark = pytest.mark.usefixtures("own_cache")


def write_recipe(folder, **task):
    file = folder / "recipe.yaml"
    file.write_text(
        f"version: 1\nname: own\nkind: training\ntask: {json.dumps(task)}\n"
        "train: {duration: 2st, batch: 4, optim: {lr: 1e-3}}\nmeasure: null\n"
    )
    return file


def weights_of(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_another_tokenizer_is_refused_for_learned_embeddings(tmp_path, texts):
    """The model speaks single words; an own vocabulary of characters would train on without a word."""
    source = strangers.model(tmp_path / "own", "llama")
    named = write_recipe(tmp_path, name="causal-lm", data=str(texts), seq_len=32, tokenizer="char")
    words = ("retrain", source, "-r", named, "-o", tmp_path / "run")
    done = leansurgeon(*words)
    assert done.returncode == 2 and "--new-tokenizer" in done.stderr and not (tmp_path / "run").exists()
    # What the sentence says helps; the other advice is followed below.
    done = leansurgeon(*words, "--set", "task.tokenizer=model")
    assert done.returncode == 0, done.stderr


def test_embeddings_start_anew_for_a_new_tokenizer(tmp_path, texts):
    source = strangers.model(tmp_path / "own", "llama")
    done = strangers.healed(source, texts, tmp_path / "run", "--new-tokenizer", "--set", "train.optim.lr=1e-12")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "run" / "model"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    old, tokenizer = (transformers.AutoTokenizer.from_pretrained(place) for place in (source, folder))
    before, after = weights_of(source), model.state_dict()
    assert tokenizer.get_vocab() != old.get_vocab()
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert len(after["model.embed_tokens.weight"]) == model.config.vocab_size >= len(tokenizer)
    kept = [name for name in before if "embed" not in name and "lm_head" not in name]
    assert kept and all(torch.allclose(before[name], after[name], atol=1e-6) for name in kept)
    same = before["model.embed_tokens.weight"][: model.config.vocab_size]
    assert not torch.allclose(same, after["model.embed_tokens.weight"][: len(same)], atol=1e-3)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path, texts):
    source = strangers.model(tmp_path / "own", "llama", vocab_size=40)
    done = strangers.healed(source, texts, tmp_path / "run")
    assert done.returncode == 2 and "61" in done.stderr and "40" in done.stderr


def test_images_get_the_size_that_the_model_takes(tmp_path):
    data = strangers.pictures(tmp_path / "images")
    source = strangers.model(tmp_path / "own", "vit", num_channels=3, num_labels=2, id2label={0: "ant", 1: "bee"})
    strangers.processor(source, 8, 3)
    named = write_recipe(tmp_path, name="folder", data=str(data), image_size=224)
    said = []
    task = prepare_task(load_training(str(named)), source, said.append)
    assert any("224" in line for line in said)
    assert (task.options.image_size, task.options.mean, task.options.std) == (8, [0.3] * 3, [0.2] * 3)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_bf16_model_comes_back_in_bf16_and_trains_in_fp32(tmp_path, texts, family):
    """A rate so small that bf16 weights would not move at all; the masters do, and tied tensors stay one."""
    source = tmp_path / "own"
    strangers.build(family).to(torch.bfloat16).save_pretrained(source)
    strangers.words(source)
    done = strangers.healed(source, texts, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    before, after = weights_of(source), weights_of(tmp_path / "run" / "model")
    assert {name: t.dtype for name, t in after.items()} == {name: t.dtype for name, t in before.items()}
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert json.loads((tmp_path / "run/model/config.json").read_text())["dtype"] == "bfloat16"
    loaded = checkpoints.load(source)
    assert next(loaded.model.parameters()).dtype == torch.float32
    # Saved again without training, it is bit for bit what it was.
    loaded.save(tmp_path / "again")
    again = weights_of(tmp_path / "again")
    assert all(torch.equal(before[name], again[name]) for name in before)


def test_a_cpu_trains_in_fp32_and_says_so_once(tmp_path, texts):
    source = strangers.model(tmp_path / "own", "llama")
    wish = ("--set", "train.precision=fp16", "--set", "train.compile=true", "--cpu-processes", "1")
    done = strangers.healed(source, texts, tmp_path / "run", *wish)
    assert done.returncode == 0, done.stderr
    assert sum("fp16" in line and "There is no GPU" in line for line in done.stderr.splitlines()) == 1
    train = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())["train"]
    assert (train["precision"], train["compile"]) == ("fp32", False)


def test_a_new_head_is_made_where_the_task_names_no_classes(tmp_path):
    source = strangers.model(tmp_path / "source", "vit")
    settings = ("train.new_head=true", "train.duration=2st", "train.batch=4", "measure=null")
    words = ("retrain", source, "-r", "digits-vit", "-o", tmp_path / "run", "--limit-batches", "2")
    done = leansurgeon(*words, *(word for setting in settings for word in ("--set", setting)))
    assert done.returncode == 0, done.stderr
    before, after = weights_of(source), weights_of(tmp_path / "run" / "last")
    names = [name for name in before if "head" in name or "classifier" in name]
    assert names and all(before[name].shape == after[name].shape for name in names)
