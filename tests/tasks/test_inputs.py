"""Texts become inputs as the model is used: what begins a window, how long a text may be, what fills it up."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tokenizers import processors
from transformers import AutoModelForCausalLM, AutoTokenizer

from leansurgeon import tasks
from leansurgeon.checkpoints.source import open_source
from leansurgeon.measure.data import calibration
from tests.support.command_line import leansurgeon
from tests.support.models import strangers

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
    windows = torch.cat([batch["input_ids"] for batch in [*data.guard, *data.heldout]])
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
