"""Texts become inputs as the model is used: what begins a window, how long a text may be, what fills it up."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import yaml
from tokenizers import processors
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2ForSequenceClassification,
    MPNetConfig,
    MPNetForMaskedLM,
)

from leansurgeon import tasks
from leansurgeon.checkpoints.source import open_source
from leansurgeon.measure.data import calibration
from tests.support.command_line import leansurgeon
from tests.support.models import strangers
from tests.support.models.word_models import WORDS, words

BEGIN = "<extra_id_0>"


def begin_texts(folder):
    """The tokenizer in a folder puts BEGIN before every text from now on, as Gemma's does."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token = BEGIN
    number = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, number)]
    )
    tokenizer.save_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder)("w1")["input_ids"][0] == number
    return number


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A decoder whose tokenizer begins texts, cut to half its layers, and running text."""
    place = tmp_path_factory.mktemp("begun")
    source, text = strangers.model(place / "source", "llama"), strangers.texts(place / "texts")
    number = begin_texts(source)
    return source, strangers.halved(place / "lean", source), text, number


def test_windows_begin_as_the_tokenizer_begins_texts_and_judge_says_the_loss_of_transformers(begun):
    source, lean, text, begin = begun
    done = leansurgeon("judge", lean, "--data", text, "--json")
    assert done.returncode == 0, done.stderr
    said = next(iter(json.loads(done.stdout)["judged"].values()))["loss"]
    data = calibration.open_calibration(str(text), open_source(str(source)), cache=source.parent)
    for part in ("fit", "guard", "heldout"):
        for batch in getattr(data, part):
            assert batch["input_ids"].shape[1] == 64 and (batch["input_ids"] == begin).nonzero()[:, 1].unique() == 0
    windows = torch.cat([batch["input_ids"] for batch in data.heldout])
    for name, folder in (("source", source), ("result", lean)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            assert said[name] == pytest.approx(float(model(input_ids=windows, labels=windows).loss), rel=1e-5)


def test_trained_windows_begin_so_too_and_together_are_the_text(begun, tmp_path):
    source, _, text, begin = begun
    options = {"data": str(text), "seq_len": 16, "random_windows": False}
    task = tasks.make("causal-lm", options)
    task.prepare(tmp_path, source, workers=1, say=print)
    ids = np.concatenate(
        [task.batch(split, np.arange(task.size(split)), seed=0, epoch=0)["input_ids"] for split in task.splits]
    )
    assert ids.shape[1] == 16 and (ids[:, 0] == begin).all() and (ids[:, 1:] != begin).all()
    tokenizer, files = AutoTokenizer.from_pretrained(source), sorted(text.rglob("*.*"))
    words = sum(len(tokenizer(file.read_text(), add_special_tokens=False)["input_ids"]) for file in files)
    assert words - 3 * 15 <= ids[:, 1:].size <= words + 3 * len(files)


def test_windows_of_a_tokenizer_that_begins_no_text_hold_text_alone(tmp_path):
    """Its `bos_token` is only a name (Qwen, GPT-2)."""
    folder = strangers.model(tmp_path / "model", "llama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token = BEGIN
    tokenizer.save_pretrained(folder)
    data = calibration.open_calibration(str(strangers.texts(tmp_path / "t")), open_source(str(folder)), cache=tmp_path)
    assert not any((batch["input_ids"] == tokenizer.bos_token_id).any() for batch in data.fit)


PADS = {  # the pad tokens that the config and the tokenizer have
    "none": (None, None),
    "of the tokenizer": (None, "<extra_id_1>"),
    "two": (1, "<extra_id_1>"),
}


@pytest.mark.parametrize("case", PADS)
def test_a_decoder_that_classifies_finds_the_last_token_of_every_text(tmp_path, case):
    """One by one no text is filled up, so transformers cannot read the wrong token."""
    pad, name = PADS[case]
    config = GPT2Config(
        n_embd=32, n_layer=4, n_head=4, n_positions=40, vocab_size=61, pad_token_id=pad, bos_token_id=1, eos_token_id=1,
        id2label={0: "bad", 1: "good"}, label2id={"bad": 0, "good": 1}, initializer_range=0.4,
    )  # fmt: skip
    source = tmp_path / "source"
    GPT2ForSequenceClassification(config).save_pretrained(source)
    words(source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.pad_token = name
    tokenizer.save_pretrained(source)
    table = strangers.reviews(tmp_path / "reviews.csv")
    rng, lines = np.random.default_rng(0), table.read_text().splitlines()
    table.write_text("\n".join(line + " w9" * int(rng.integers(0, 9) * (i > 0)) for i, line in enumerate(lines)))
    expected = pad if pad is not None else tokenizer.pad_token_id if name else 1

    lean = tmp_path / "lean"
    options = {"train": str(table), "text": "review", "label": "stars", "seq_len": 40}
    spec = "task:text-classification," + ",".join(f"{key}={value}" for key, value in options.items())
    done = leansurgeon("shrink", source, "--layers", 3, "--calibrate", spec, "-o", lean)
    assert done.returncode == 0, done.stderr
    assert ("texts are filled up with" in done.stderr) == (pad is None)
    said = json.loads((lean / "surgery.json").read_text())["proof"]["compared"]
    task = tasks.make("text-classification", options)
    task.prepare(tmp_path / "cache", source, workers=1, say=print)
    batch = task.batch("test", np.arange(task.size("test")), seed=0, epoch=0)
    assert (batch["input_ids"] == expected).any() and not batch["attention_mask"].all()
    model, right = GPT2ForSequenceClassification.from_pretrained(source).eval(), []
    for ids, mask, label in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
        with torch.no_grad():
            right.append(int(model(input_ids=ids[mask.bool()][None]).logits.argmax()) == int(label))
    assert said["accuracy"]["source"] == pytest.approx(np.mean(right))

    done = strangers.healed(source, table, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert ("texts are filled up with" in done.stderr) == (pad is None)
    for folder in (lean, tmp_path / "run" / "model"):
        assert json.loads((folder / "config.json").read_text())["pad_token_id"] == expected


@pytest.fixture(scope="module")
def long_texts(tmp_path_factory):
    """A classifier that knows a text by its last word, and texts of which half are longer than 128 words; the model has
    300 positions and its tokenizer cuts at 256.
    """
    place = tmp_path_factory.mktemp("long")
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=32, n_layer=3, n_head=4, n_positions=300, vocab_size=61, pad_token_id=0, bos_token_id=1, eos_token_id=1,
        num_labels=2, id2label={0: "bad", 1: "good"}, label2id={"bad": 0, "good": 1},
    )  # fmt: skip
    model = GPT2ForSequenceClassification(config)
    with torch.no_grad():  # blocks add nothing: the last token alone speaks
        for block in model.transformer.h:
            for part in (block.attn.c_proj, block.mlp.c_proj):
                part.weight.zero_(), part.bias.zero_()
        model.transformer.wpe.weight.zero_()
        hidden = model.transformer.ln_f(model.transformer.wte.weight)
        model.score.weight[1] = hidden[12] - hidden[11]  # w1 is good, w0 is bad
        model.score.weight[0] = -model.score.weight[1]
    model.save_pretrained(place / "model")
    words(place / "model")
    tokenizer = AutoTokenizer.from_pretrained(place / "model", model_max_length=256)
    tokenizer.save_pretrained(place / "model")
    rng, lines = np.random.default_rng(0), ["text,label"]
    for i in range(200):
        count = [20, 200][i // 2 % 2] if i >= 10 else 290
        lines.append(f"{' '.join(rng.choice(WORDS[5:], count))} w{i % 2},{('bad', 'good')[i % 2]}")
    (place / "long.csv").write_text("\n".join(lines) + "\n")
    return place / "model", place / "long.csv"


def test_texts_are_read_up_to_the_models_own_length(long_texts, tmp_path):
    """Cut at 128 tokens, the longer half of the texts would be judged on a word that says nothing."""
    model, table = long_texts
    done = leansurgeon("shrink", model, "--layers", 2, "--calibrate", table, "-o", tmp_path / "lean")
    assert done.returncode == 0, done.stderr
    assert "10 texts longer than 256 tokens are cut" in " ".join(done.stderr.split())
    judged = json.loads((tmp_path / "lean" / "surgery.json").read_text())["judged"]["long.csv"]
    assert judged["accuracy"]["source"] > 0.9
    done = strangers.healed(model, table, tmp_path / "run")
    assert done.returncode == 0 and "10 texts longer than 256 tokens are cut" in " ".join(done.stderr.split())
    assert yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())["task"]["seq_len"] == 256


def test_batches_of_long_texts_hold_few_of_them():
    lengths = np.array([2, 600, 5, 4096, 130, 9000] + [128] * 40)
    sizes = [lengths[rows] for rows in calibration.by_length(np.arange(len(lengths)), lengths)]
    assert np.array_equal(np.concatenate(sizes), np.sort(lengths)) and len(sizes[0]) == 32
    assert all(len(part) == 1 or part.max() * len(part) <= 32 * 128 for part in sizes)


def test_positions_that_no_token_has_are_no_room(tmp_path):
    """MPNet's begin behind that of padding, as RoBERTa's do: of 40 rows 38 are for tokens."""
    config = MPNetConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, vocab_size=61,
        max_position_embeddings=40, pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    MPNetForMaskedLM(config).save_pretrained(tmp_path / "model")
    words(tmp_path / "model", mask="<extra_id_0>")
    source = open_source(str(tmp_path / "model"))
    ids = torch.full((1, 39), 12)
    with pytest.raises((IndexError, RuntimeError)):
        MPNetForMaskedLM.from_pretrained(source.folder)(input_ids=ids)
    text = strangers.texts(tmp_path / "texts")
    done = leansurgeon("shrink", source.folder, "--layers", 2, "--calibrate", text, "-o", tmp_path / "lean")
    assert done.returncode == 0, done.stderr
    data = calibration.open_calibration(str(text), source, cache=tmp_path)
    assert {batch["input_ids"].shape[1] for batch in data.fit} == {38}
