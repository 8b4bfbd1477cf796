"""The test split: read at the end, with the last weights and with those that validation chose, and by hand here."""

import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification

from leansurgeon import tasks
from leansurgeon.training.data_loader import FirstSamples
from leansurgeon.training.loop import train
from leansurgeon.training.recipe.schema import TrainingRecipe

OPTIONS = {"train": 64, "eval": 24, "test": 40, "min_length": 5, "max_length": 30}
TRAIN = {
    "duration": "6st",
    "batch": 16,
    "optim": {"lr": 0.05},  # too much, so that an early step is the best
    "schedule": {"name": "constant"},
}


@pytest.fixture
def model_dir(tmp_path):
    torch.manual_seed(0)
    small = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    model = BertForSequenceClassification(BertConfig(vocab_size=32, num_labels=10, **small))
    model.save_pretrained(tmp_path / "start")
    return tmp_path / "start"


@pytest.fixture
def task(tmp_path, model_dir, monkeypatch):
    monkeypatch.setenv("LEANSURGEON_CACHE", str(tmp_path / "cache"))
    made = tasks.make("listops", OPTIONS)
    made.prepare(tmp_path / "cache", model_dir, workers=1, say=lambda text: None)
    return made


def test_it_is_read_with_the_last_and_with_the_chosen_weights(model_dir, task, tmp_path):
    said, summaries = [], []
    for read in (True, False):
        settings = TRAIN | {"eval": {"every": "1st", "batch": 16, "test": read}}
        recipe = TrainingRecipe(name="x", task={"name": "listops"} | OPTIONS, train=settings, measure=None)
        summaries.append(train(recipe, model_dir, tmp_path / f"run-{read}", say=said.append, cpu=True).as_dict())
    summary, without = summaries
    run = tmp_path / "run-True"
    assert summary["best"]["step"] < 6  # otherwise this shows nothing
    assert summary["test"]["samples"] == 40 and summary["task"]["eval_samples"] == 24
    batch = task.batch("test", np.arange(40), seed=0, epoch=0)
    labels = batch.pop("labels")
    for which, folder in (("last", "last"), ("best", "model")):
        with torch.no_grad():
            logits = BertForSequenceClassification.from_pretrained(run / folder).eval()(**batch).logits
        assert summary["test"][which]["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
        assert summary["test"][which]["metric"] == pytest.approx((logits.argmax(-1) == labels).float().mean().item())
    assert summary["test"]["last"] != summary["test"]["best"]
    kinds = [json.loads(line)["type"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert kinds.count("test") == 1 and kinds[-1] == "test"
    assert sum("test split, 40 samples" in line and "best by validation" in line for line in said) == 1
    assert set(summary["model"]["start"]["files"]) == {"model.safetensors", "config.json"}
    assert without["test"] is None and without["final"] == summary["final"]


def test_a_task_without_one_has_none_and_a_limit_holds_for_it(task):
    assert "test" not in tasks.make("digits", {}).splits
    assert FirstSamples(task, 32, 16).size("test") == 16
