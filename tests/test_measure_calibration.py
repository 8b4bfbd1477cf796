"""Calibration data: what a name stands for, that the parts have no sample in common, and what is refused."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UsageError
from leansurgeon.measure import calibration
from leansurgeon.tasks.vocab import make
from tests.conftest import build

TEXT = "\n".join(f"Sentence number {i} says that {i * i} is the square of {i}." for i in range(2_000))


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture
def language_model(tmp_path):
    """A saved family with a small tokenizer of its own beside it."""

    def made(family: str):
        folder = tmp_path / family
        model = build(family)
        model.save_pretrained(folder)
        make("byte", None, []).save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        return open_source(str(folder)), config

    return made


def rows(batches, key):
    return [tuple(row.tolist()) for batch in batches for row in batch[key]]


def test_parts_of_a_task_share_no_sample(tmp_path):
    source = open_source("digits-vit")
    found = calibration.open_calibration("task:digits", source, cache=tmp_path)
    images = [rows([{"x": b["pixel_values"].flatten(1)} for b in getattr(found, part)], "x") for part in PARTS]
    assert [len(part) for part in images] == [1150, 287, 360]
    assert all(not set(a) & set(b) for a, b in itertools.combinations(images, 2))


PARTS = ("fit", "guard", "heldout")


def test_the_digest_follows_the_samples(tmp_path):
    source = open_source("digits-vit")
    digests = [
        calibration.open_calibration("task:digits", source, cache=tmp_path, samples=n, seed=seed).digest
        for n, seed in ((64, 0), (64, 0), (64, 1), (65, 0))
    ]
    assert digests[0] == digests[1] and len(set(digests)) == 3


def test_the_score_is_the_losss_sum(tmp_path):
    source = open_source("digits-vit")
    found = calibration.open_calibration("task:digits", source, cache=tmp_path, samples=64)
    batch = found.fit[0]
    logits = torch.randn(len(batch["labels"]), 10)
    total, count = found.score(logits, batch)
    assert total / count == pytest.approx(float(torch.nn.functional.cross_entropy(logits, batch["labels"])), rel=1e-5)
    assert found.score(logits[:, :3], batch) is None  # a head for other classes


def test_a_language_model_gets_windows_of_its_own_length(language_model, text, tmp_path):
    source, config = language_model("gpt2")
    found = calibration.open_calibration(str(text), source, cache=tmp_path / "cache", samples=20)
    length = config["n_positions"]
    assert all(b["input_ids"].shape[1] == length for part in PARTS for b in getattr(found, part))
    assert len(rows(found.fit, "input_ids")) == 20 and found.task.head == "causal-lm"


def test_an_encoder_without_a_head_gets_sentences(language_model, text, tmp_path):
    source, _ = language_model("bert")
    source.config["architectures"] = ["BertModel"]
    found = calibration.open_calibration(str(text), source, cache=tmp_path / "cache", samples=64)
    assert found.mask(found.fit[0]).dtype == torch.bool and found.score(torch.zeros(1), found.fit[0]) is None
    assert [sum(len(b["input_ids"]) for b in getattr(found, part)) for part in PARTS] == [64, 16, 400]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("nowhere.txt", "is no folder"),
        ("task:digit", "did you mean 'digits'"),
        ("task:digits,split", "write key=value"),
        ("task:digits,split_sed=1", "did you mean 'split_seed'"),
        ("task:listops", "takes images"),
        ("", "names no data"),
    ],
)
def test_what_cannot_serve_is_one_sentence(spec, says, tmp_path):
    with pytest.raises(UsageError, match=says):
        calibration.open_calibration(spec, open_source("digits-vit"), cache=tmp_path)


def test_text_shorter_than_a_window_is_refused(language_model, tmp_path):
    source, _ = language_model("gpt2")
    file = tmp_path / "short.txt"
    file.write_text("Too short.")
    with pytest.raises(UsageError, match="too few for one window"):
        calibration.open_calibration(str(file), source, cache=tmp_path / "cache")
