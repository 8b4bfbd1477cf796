"""The test split: read at the end, with the last weights and with those that validation chose, and by hand here."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from leansurgeon import tasks
from leansurgeon.training.data_loader import FirstSamples
from leansurgeon.training.loop import train
from leansurgeon.training.recipe.schema import TrainingRecipe

TASK = {"name": "listops", "train": 64, "eval": 24, "test": 40, "min_length": 5, "max_length": 30}


def recipe(**evaluation):
    settings = {
        "duration": "6st",
        "batch": 16,
        "optim": {"lr": 0.05},  # too much, so that an early step is the best
        "schedule": {"name": "constant"},
        "eval": {"every": "1st", "batch": 16, **evaluation},
    }
    return TrainingRecipe(name="listops", task=TASK, train=settings, measure=None)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    config = BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=10
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def by_hand(task, folder):
    batch = task.batch("test", np.arange(40), seed=0, epoch=0)
    model = BertForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    loss = torch.nn.functional.cross_entropy(logits, batch["labels"])
    return float(loss), float((logits.argmax(-1) == batch["labels"]).float().mean())


def test_it_is_read_with_the_last_and_with_the_chosen_weights(model_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("LEANSURGEON_CACHE", str(tmp_path / "cache"))
    said = []
    summary = train(recipe(), model_dir, tmp_path / "run", say=said.append, cpu=True).as_dict()
    task = tasks.make("listops", {key: value for key, value in TASK.items() if key != "name"})
    task.prepare(tmp_path / "cache", model_dir, workers=1, say=lambda text: None)
    assert summary["best"]["step"] < 6  # otherwise this shows nothing
    assert summary["test"]["samples"] == 40 and summary["task"]["eval_samples"] == 24
    for which, folder in (("last", "last"), ("best", "model")):
        loss, accuracy = by_hand(task, tmp_path / "run" / folder)
        assert summary["test"][which]["loss"] == pytest.approx(loss, rel=1e-5)
        assert summary["test"][which]["metric"] == pytest.approx(accuracy)
    assert summary["test"]["last"] != summary["test"]["best"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["type"] for row in rows].count("test") == 1 and rows[-1]["type"] == "test"
    assert any("test split, 40 samples" in line and "best by validation" in line for line in said)
    assert summary["model"]["start"]["name"] == model_dir.name
    assert set(summary["model"]["start"]["files"]) == {"model.safetensors", "config.json"}

    without = train(recipe(test=False), model_dir, tmp_path / "other", say=lambda text: None, cpu=True).as_dict()
    assert without["test"] is None and without["final"] == summary["final"]


def test_a_task_without_one_has_none_and_a_limit_holds_for_it():
    task = tasks.make("digits", {})
    assert "test" not in task.splits
    task = tasks.make("listops", {key: value for key, value in TASK.items() if key != "name"})
    task._info = {"sizes": {"train": 64, "eval": 24, "test": 40}}
    task._folder = object()
    assert FirstSamples(task, 32, 16).size("test") == 16
