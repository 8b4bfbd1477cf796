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

from leansurgeon.checkpoints.source import open_source
from leansurgeon.measure.data import calibration
from tests.support.command_line import leansurgeon
from tests.support.models import strangers
from tests.support.models.word_models import WORDS, words
from tests.tasks.prepared import everything, prepare

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
    for batch in [*data.fit, *data.guard, *data.heldout]:
        assert batch["input_ids"].shape[1] == 64 and (batch["input_ids"] == begin).nonzero()[:, 1].unique() == 0
    windows = torch.cat([batch["input_ids"] for batch in data.heldout])
    for name, folder in (("source", source), ("result", lean)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            assert said[name] == pytest.approx(float(model(input_ids=windows, labels=windows).loss), rel=1e-5)


def test_trained_windows_begin_so_too_and_together_are_the_text(begun, tmp_path):
    source, _, text, begin = begun
    task = prepare(tmp_path, "causal-lm", source, data=str(text), seq_len=16, random_windows=False)
    ids = np.concatenate([everything(task, split)["input_ids"] for split in task.splits])
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


PADS = {  # the pad tokens that the config and the tokenizer have, and the one that is used
    "none": (None, None, 1),
    "two": (1, "<extra_id_1>", 1),
    "of the tokenizer": (None, "<extra_id_1>", 4),
}


@pytest.mark.parametrize("case", PADS)
def test_a_decoder_that_classifies_finds_the_last_token_of_every_text(tmp_path, case):
    """One by one no text is filled up, so transformers cannot read the wrong token."""
    pad, name, expected = PADS[case]
    config = GPT2Config(
        n_embd=32, n_layer=4, n_head=4, n_positions=40, vocab_size=61, pad_token_id=pad, bos_token_id=1, eos_token_id=1,
        id2label={0: "bad", 1: "good"}, label2id={"bad": 0, "good": 1}, initializer_range=0.4,
    )  # fmt: skip
    source, lean = tmp_path / "source", tmp_path / "lean"
    GPT2ForSequenceClassification(config).save_pretrained(source)
    words(source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.pad_token = name
    tokenizer.save_pretrained(source)
    table = strangers.reviews(tmp_path / "reviews.csv")
    rng, (head, *lines) = np.random.default_rng(0), table.read_text().splitlines()
    table.write_text("\n".join([head, *(line + " w9" * int(rng.integers(0, 9)) for line in lines)]))

    spec = f"task:text-classification,train={table},text=review,label=stars,seq_len=40"
    done = leansurgeon("shrink", source, "--layers", 3, "--calibrate", spec, "--heal", "none", "-o", lean)
    assert done.returncode == 0, done.stderr
    assert ("texts are filled up with" in done.stderr) == (pad is None)
    assert json.loads((lean / "config.json").read_text())["pad_token_id"] == expected
    said = json.loads((lean / "surgery.json").read_text())["proof"]["compared"]
    options = {"train": str(table), "text": "review", "label": "stars", "seq_len": 40}
    batch = everything(prepare(tmp_path / "cache", "text-classification", source, **options), "test")
    assert (batch["input_ids"] == expected).any() and not batch["attention_mask"].all()
    model, right = GPT2ForSequenceClassification.from_pretrained(source).eval(), []
    for ids, mask, label in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
        with torch.no_grad():
            right.append(int(model(input_ids=ids[mask.bool()][None]).logits.argmax()) == int(label))
    assert said["accuracy"]["source"] == pytest.approx(np.mean(right))
    if case == "none":
        done = strangers.healed(source, table, tmp_path / "run")
        assert done.returncode == 0 and "texts are filled up with" in done.stderr
        assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["pad_token_id"] == expected


def test_texts_are_read_up_to_the_models_own_length(tmp_path):
    """A model that knows a text by its last word, with 150 positions and a tokenizer that cuts at 140. Cut at 128
    tokens, the longer half of the texts would be judged on a word that says nothing.
    """
    config = GPT2Config(
        n_embd=32, n_layer=3, n_head=4, n_positions=150, vocab_size=61, pad_token_id=0, bos_token_id=1, eos_token_id=1,
        num_labels=2, id2label={0: "bad", 1: "good"}, label2id={"bad": 0, "good": 1},
    )  # fmt: skip
    torch.manual_seed(0)
    model, folder = GPT2ForSequenceClassification(config), tmp_path / "model"
    with torch.no_grad():  # blocks add nothing: the last token alone speaks
        for block in model.transformer.h:
            for part in (block.attn.c_proj, block.mlp.c_proj):
                part.weight.zero_(), part.bias.zero_()
        model.transformer.wpe.weight.zero_()
        hidden = model.transformer.ln_f(model.transformer.wte.weight)
        model.score.weight[1] = hidden[12] - hidden[11]  # w1 is good, w0 is bad
        model.score.weight[0] = -model.score.weight[1]
    model.save_pretrained(folder)
    words(folder)
    AutoTokenizer.from_pretrained(folder, model_max_length=140).save_pretrained(folder)
    rng, lines = np.random.default_rng(0), ["text,label"]
    for i in range(120):
        count = [20, 135][i // 2 % 2] if i >= 10 else 145
        lines.append(f"{' '.join(rng.choice(WORDS[5:], count))} w{i % 2},{('bad', 'good')[i % 2]}")
    table = tmp_path / "long.csv"
    table.write_text("\n".join(lines) + "\n")

    done = leansurgeon("judge", folder, "--against", folder, "--data", table, "--json")
    assert done.returncode == 0 and "10 texts longer than 140 tokens are cut" in " ".join(done.stderr.split())
    (judged,) = json.loads(done.stdout)["judged"].values()
    assert judged["accuracy"]["source"] > 0.9
    done = strangers.healed(folder, table, tmp_path / "run")
    assert done.returncode == 0 and "10 texts longer than 140 tokens are cut" in " ".join(done.stderr.split())
    assert yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())["task"]["seq_len"] == 140


def test_positions_that_no_token_has_are_no_room(tmp_path):
    """MPNet's begin behind that of padding, as RoBERTa's do: of 40 rows 38 are for tokens."""
    folder = tmp_path / "model"
    config = MPNetConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, vocab_size=61,
        max_position_embeddings=40, pad_token_id=1,
    )  # fmt: skip
    MPNetForMaskedLM(config).save_pretrained(folder)
    words(folder, mask="<extra_id_0>")
    text = strangers.texts(tmp_path / "texts")
    data = calibration.open_calibration(str(text), open_source(str(folder)), cache=tmp_path)
    assert {batch["input_ids"].shape[1] for batch in data.fit} == {38}
    model = MPNetForMaskedLM.from_pretrained(folder)
    model(input_ids=data.fit[0]["input_ids"])
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, 39), 12))
