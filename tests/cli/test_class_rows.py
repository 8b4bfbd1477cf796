"""Forms in which people have labels, through the commands: each says what the model reaches by plain libraries, and
keeps its head and its names.
"""

from __future__ import annotations

import csv
import io
import json

import datasets
import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from tests.cli.answers import heals, stderr_of, works
from tests.cli.test_classes import NAMES, digits, folders, named, trained  # noqa: F401, fixtures
from tests.support.command_line import leansurgeon
from tests.support.content import side_of
from tests.support.models import strangers
from tests.support.models.word_models import WORDS, words

CLASSES = 12


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
    how = ("--layers", 2, "--calibrate", data, "--heal", "none", "-o", tmp_path / "cut")
    judge = ("judge", tmp_path / "cut", "--data", data, "--json")
    heads = ("heads", trained, "--data", data, "--steps", 2, "--samples", 64, "--json")
    kappa = ("kappa", trained, "--data", data, "--samples", 8, "--probes", 0)
    done = [leansurgeon(*command) for command in (("shrink", trained, *how), judge, heads, kappa)]
    for one in done:
        assert one.returncode == 0 and "1 is output 0" in stderr_of(one), one.stderr
    record = json.loads((tmp_path / "cut" / "surgery.json").read_text())
    said = [record["proof"]["compared"]["accuracy"]["source"]]
    said.append(json.loads(done[1].stdout)["judged"][str(data)]["accuracy"]["source"])
    said.append(json.loads(done[2].stdout)["whole"]["accuracy"])
    assert min(said) > 0.75, said


def before(done, run, model):
    """What a healing says of the model at its start; head and names are as they were."""
    assert done.returncode == 0 and "new head" not in done.stderr, done.stderr
    own, made = (json.loads((place / "config.json").read_text()) for place in (model, run / "model"))
    assert len(made["id2label"]) == len(own["id2label"])
    return json.loads((run / "summary.json").read_text())["before"]["metric"], made["id2label"]


def truth(model, images, labels):
    """Of plain transformers, on all images."""
    plain = transformers.AutoModelForImageClassification.from_pretrained(model).eval()
    pixels = (torch.tensor(images / 255, dtype=torch.float32)[:, None].expand(-1, 3, -1, -1) - 0.3) / 0.2
    with torch.no_grad():
        return float((plain(pixels).logits.argmax(-1) == torch.tensor(labels)).float().mean())


def test_parquet_whose_classes_have_another_order(trained, digits, tmp_path):  # noqa: F811
    model, (images, labels) = named(trained, tmp_path / "model", NAMES), digits
    pictures = []
    for image in images[:600]:
        buffer = io.BytesIO()
        Image.fromarray(image).convert("RGB").save(buffer, "png")
        pictures.append({"bytes": buffer.getvalue(), "path": None})
    order, data = sorted(NAMES), tmp_path / "train.parquet"
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=order)})
    columns = {"image": pictures, "label": [order.index(NAMES[label]) for label in labels[:600]]}
    datasets.Dataset.from_dict(columns, features=features).to_parquet(data)
    done = heals(model, data, tmp_path / "run", "--set", "train.optim.lr=1e-12")
    right, names = before(done, tmp_path / "run", model)
    assert right == pytest.approx(truth(model, images[:600], labels[:600]), abs=0.08)
    assert [*names.values()] == NAMES


def bert(folder, seed=0, **options):
    """A small classifier of texts with a tokenizer of single words."""
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, vocab_size=61,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **options,
    )  # fmt: skip
    words(folder)
    return transformers.BertForSequenceClassification(config), transformers.AutoTokenizer.from_pretrained(folder)


def write(file, texts, labels):
    with file.open("w", newline="") as opened:
        csv.writer(opened).writerows([("text", "label"), *zip(texts, labels, strict=True)])
    return file


def test_topics_as_floats_and_rows_without_a_label(tmp_path):
    """0.0 ... 11.0, as pandas writes a column with gaps, and SNLI's -1. The model knows its topics."""
    model, tokenizer = bert(tmp_path, max_position_embeddings=40, initializer_range=0.1, num_labels=CLASSES)
    rng, topics = np.random.default_rng(0), torch.arange(480) % CLASSES
    texts = [f"{WORDS[topic]} {' '.join(rng.choice(WORDS[CLASSES:], 5))}" for topic in topics]
    ids = tokenizer(texts, return_tensors="pt")["input_ids"]
    updates = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(100):
        chosen = torch.randint(480, (64,))
        model(ids[chosen], labels=topics[chosen]).loss.backward()
        updates.step()
        updates.zero_grad()
    model.save_pretrained(tmp_path)
    gaps = [f"{text} w40" for text in texts[:30]]
    data = write(tmp_path / "topics.csv", [*texts, *gaps], [*(f"{topic}.0" for topic in topics), *["-1.0"] * 30])
    done = strangers.healed(tmp_path, data, tmp_path / "run", "--set", "train.optim.lr=1e-12")
    said, _ = before(done, tmp_path / "run", tmp_path)
    assert said > 0.9 and "30 without label left out" in stderr_of(done)


def test_texts_are_cut_at_the_models_own_length(tmp_path):
    """A random model that reads 192 tokens, and what plain transformers makes of texts of 150 and 200."""
    model, tokenizer = bert(
        tmp_path, max_position_embeddings=192, initializer_range=0.3, id2label={0: "bad", 1: "good"}
    )
    model.save_pretrained(tmp_path)
    model.eval()
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS[2:12], 200 if i < 20 else 150)) for i in range(160)]
    data = write(tmp_path / "long.csv", texts, [("bad", "good")[i % 2] for i in range(160)])
    how = ("--steps", 2, "--samples", 16, "--no-curve", "--classes", "bad,good", "--ablate", "--json")
    ranked = works("heads", tmp_path, "--data", data, *how)
    assert "20 texts longer than 192 tokens are cut" in stderr_of(ranked)
    losses = []
    for i, text in enumerate(texts):
        if side_of(text) == "test":
            given = tokenizer(text, return_tensors="pt", truncation=True, max_length=192)
            losses.append(model(**given, labels=torch.tensor([i % 2])).loss.item())
    assert json.loads(ranked.stdout)["whole"]["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
