"""Forms in which people have labels, through the commands: each says what the model reaches by plain libraries, and
keeps its head and its names.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers

from tests.cli.answers import read, stderr_of, works
from tests.cli.test_classes import NAMES, digits, folders, named, trained  # noqa: F401, fixtures
from tests.support.content import side_of
from tests.support.models.word_models import WORDS, words


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEANSURGEON_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def test_folders_by_number_are_in_natural_order_for_every_command(trained, folders, tmp_path):  # noqa: F811
    """1..10 on a model without names: 10 does not stand behind 1. And a folder that a notebook leaves is no class."""
    data = folders([str(i + 1) for i in range(10)])
    (data / ".ipynb_checkpoints").mkdir()
    (data / ".ipynb_checkpoints" / "a.png").write_bytes((data / "1" / "0.png").read_bytes())
    cut = tmp_path / "cut"
    shrunk = works(f"shrink {trained} --layers 2 --calibrate {data} --heal none -o {cut}")
    judged = works(f"judge {cut} --data {data} --json")
    ranked = works(f"heads {trained} --data {data} --steps 2 --samples 64 --json")
    kappa = works(f"kappa {trained} --data {data} --samples 8 --probes 0")
    assert all("1 is output 0" in stderr_of(done) for done in (shrunk, judged, ranked, kappa))
    assert read(cut / "surgery.json")["proof"]["compared"]["accuracy"]["source"] > 0.75
    assert json.loads(judged.stdout)["judged"][str(data)]["accuracy"]["source"] > 0.75
    assert json.loads(ranked.stdout)["whole"]["accuracy"] > 0.75


def test_texts_are_cut_at_the_models_own_length(tmp_path):
    """A random model that reads 192 tokens, and what plain transformers makes of texts of 150 and 200."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, vocab_size=61,
        max_position_embeddings=192, initializer_range=0.3, id2label={0: "bad", 1: "good"},
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    words(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS[2:12], 200 if i < 20 else 150)) for i in range(160)]
    lines = [f"{text},{('bad', 'good')[i % 2]}" for i, text in enumerate(texts)]
    (tmp_path / "long.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    how = "--steps 2 --samples 16 --no-curve --classes bad,good --ablate --json"
    ranked = works(f"heads {tmp_path} --data {tmp_path}/long.csv {how}")
    assert "20 texts longer than 192 tokens are cut" in stderr_of(ranked)
    losses = []
    for i, text in enumerate(texts):
        if side_of(text) == "test":
            given = tokenizer(text, return_tensors="pt", truncation=True, max_length=192)
            losses.append(model(**given, labels=torch.tensor([i % 2])).loss.item())
    assert json.loads(ranked.stdout)["whole"]["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
