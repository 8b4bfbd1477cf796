"""The loop against a bare PyTorch loop, and what it promises about accumulation, errors and files."""

from __future__ import annotations

import json
import math
import re
import time

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from leansurgeon.errors import Diverged, LeanSurgeonError, UsageError
from leansurgeon.training import data_loader, evaluator
from leansurgeon.training.loop import train
from tests.support.training_standin import Dots, Words, dot_model, recipe, word_model


def _run(tmp_path, name="run", *, loaded=None, task=None, **settings):
    summary = train(
        recipe(**settings),
        tmp_path,
        tmp_path / name,
        loaded=loaded or word_model(),
        task=task or Words(),
        cpu=True,
        say=lambda text: None,
    ).as_dict()
    rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    return summary, rows


def _losses(rows, kind="train"):
    return [row["loss"] for row in rows if row["type"] == kind]


def test_losses_equal_those_of_a_bare_loop(tmp_path):
    from transformers import get_scheduler

    loaded = word_model()
    summary, rows = _run(tmp_path, loaded=loaded, seed=3)
    task, model = Words(), word_model().model
    undecayed = {"wpe.weight", "norm.weight", "norm.bias", "mix.bias", "head.bias"}
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if n not in undecayed], "weight_decay": 0.1},
        {"params": [p for n, p in named.items() if n in undecayed], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2)
    schedule = get_scheduler("cosine", adamw, num_warmup_steps=2, num_training_steps=8)
    expected = []
    for epoch in range(2):
        shuffled = data_loader.epoch_order(3, epoch, 64)
        for start in range(0, 64, 16):
            batch = task.batch("train", shuffled[start : start + 16], seed=3, epoch=epoch)
            logits = model(batch["input_ids"])
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adamw.step()
            schedule.step()
            adamw.zero_grad()
            expected.append(loss.item())
    assert _losses(rows) == pytest.approx(expected, abs=1e-6)
    for name, value in loaded.model.named_parameters():
        assert torch.allclose(value, named[name], atol=1e-6), name
    assert summary["steps"] == 8 and summary["epochs"] == 2 and summary["seed"] == 3


def test_rows_are_read_as_stored_where_the_recipe_says_so(tmp_path):
    """As the rows of the Pile by its authors, whose order is a curriculum: in every epoch."""
    read = []

    class Watched(Words):
        def batch(self, split, indices, **chance):
            read.extend(indices.tolist() if split == "train" else ())
            return super().batch(split, indices, **chance)

    summary, _ = _run(tmp_path, task=Watched(), order="as-stored", batch=16, micro_batch=8, duration="2ep")
    assert summary["steps"] == 8 and read[-128:] == [*range(64)] * 2


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_accumulation_changes_nothing_though_token_counts_differ(tmp_path, precision):
    tolerance = 1e-5 if precision == "fp32" else 3e-2
    _, whole = _run(tmp_path, "whole", precision=precision)
    _, parts = _run(tmp_path, "parts", precision=precision, micro_batch=4)
    assert _losses(parts) == pytest.approx(_losses(whole), abs=tolerance)
    assert _losses(parts, "eval") == pytest.approx(_losses(whole, "eval"), abs=tolerance)
    counts = [(Words().batch("train", np.arange(i, i + 4), seed=0, epoch=0)["labels"] != -100).sum() for i in (0, 4)]
    assert counts[0] != counts[1]  # else this test would show nothing


def test_evaluation_before_the_first_step_best_and_last(tmp_path):
    loaded = word_model()
    start = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    summary, rows = _run(tmp_path, loaded=loaded)
    evals = [row for row in rows if row["type"] == "eval"]
    assert [row["step"] for row in evals] == [0, 4, 8]
    assert summary["before"]["loss"] == evals[0]["loss"]
    assert summary["best"]["metric"] == min(row["metric"] for row in evals[1:])  # perplexity: lower is better
    assert summary["final"]["metric"] == pytest.approx(math.exp(summary["final"]["loss"]))
    # The loss before the first step by another way: all 13 samples at once through the untouched weights.
    fresh = word_model().model
    fresh.load_state_dict(start)
    batch = Words().batch("eval", np.arange(13), seed=0, epoch=0)
    loss = F.cross_entropy(fresh(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
    assert summary["before"]["loss"] == pytest.approx(loss.item(), abs=1e-6)
    last = torch.load(tmp_path / "run" / "last" / "weights.pt", weights_only=True)
    assert all(torch.equal(last[name], value) for name, value in loaded.model.state_dict().items())
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "last",
        "metrics.jsonl",
        "model",
        "recipe.yaml",
        "summary.json",
    ]
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert summary["memory"]["kind"] == "process peak RSS" and summary["memory"]["bytes"] > 2**24
    assert summary["throughput_unit"] == "tokens/s" and summary["status"] == "done"  # its value: test_speed.py


def test_a_task_that_scores_too_few_samples_is_an_error(tmp_path):
    class Careless(Dots):
        def score(self, logits, batch, **options):
            return super().score(logits[:3], {"labels": batch["labels"][:3]})

    with pytest.raises(LeanSurgeonError, match=r"scored \d+ samples of 13"):
        _run(tmp_path, loaded=dot_model(), task=Careless())


def test_an_exploding_run_is_stopped(tmp_path):
    with pytest.raises(Diverged, match="loss") as error:
        _run(tmp_path, optim={"lr": 1e30}, clip_grad=0.0, duration="40st")
    assert error.value.hint.startswith("Lower train.optim.lr (it is 1e+30)")  # a third of it would be no advice


def test_ctrl_c_says_what_was_kept(tmp_path):
    class Impatient(Words):
        def batch(self, split, indices, **kwargs):
            self.calls = getattr(self, "calls", 0) + (split == "train")
            if self.calls == 6:
                raise KeyboardInterrupt
            return super().batch(split, indices, **kwargs)

    said = []
    with pytest.raises(KeyboardInterrupt):
        train(recipe(), tmp_path, tmp_path / "run", loaded=word_model(), task=Impatient(), cpu=True, say=said.append)
    assert re.search(r"\bInterrupted\b.*\bbest model\b.*\(step 4\)", said[-1], re.S)
    assert (tmp_path / "run" / "model" / "weights.pt").is_file()


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("three years of work")
    with pytest.raises(UsageError, match="not empty"):
        _run(tmp_path)
    with pytest.raises(UsageError, match="not empty"):  # `replace` gives up runs, and nothing else
        train(recipe(), tmp_path, tmp_path / "run", loaded=word_model(), task=Words(), cpu=True, replace=True)
    assert (tmp_path / "run" / "thesis.txt").exists()
    _run(tmp_path, "other", duration="1st")
    train(recipe(), tmp_path, tmp_path / "other", loaded=word_model(), task=Words(), cpu=True, replace=True)
    assert json.loads((tmp_path / "other" / "summary.json").read_text())["steps"] == 8


def test_a_training_that_is_refused_leaves_no_folder(tmp_path):
    (tmp_path / "model").mkdir()  # no config.json in it
    with pytest.raises(LeanSurgeonError):
        train(recipe(), tmp_path / "model", tmp_path / "run", task=Words(), cpu=True, say=lambda text: None)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_still_falling():
    falling = [2.0 / (1 + i) for i in range(4)] + [0.35, 0.2, 0.1, 0.02]
    finished = [2.0, 1.0, 0.5, 0.3, 0.22, 0.21, 0.205, 0.204]
    overfit = [2.0, 1.0, 0.5, 0.4, 0.45, 0.5]
    assert evaluator.still_falling(falling)
    assert not evaluator.still_falling(finished)
    assert not evaluator.still_falling(overfit)
    assert not evaluator.still_falling([3.0, 1.0])


def test_training_on_digits_learns(tmp_path):
    """The real task through the real loop, with the plainest model: logistic regression reaches 90 % and more."""
    from leansurgeon import tasks
    from tests.support.training_standin import StandIn

    task = tasks.make("digits")
    task.prepare(tmp_path / "cache", None, workers=1, say=lambda text: None)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    start = time.perf_counter()
    summary, _ = _run(
        tmp_path,
        loaded=StandIn(model, "pixel_values"),
        task=task,
        duration="5ep",
        batch=64,
        log_every=10,
        eval={"every": "1ep", "batch": 100},
    )
    assert summary["task"]["train_samples"] == 1437 and summary["task"]["eval_samples"] == 360
    assert summary["final"]["metric"] > 0.9 > summary["before"]["metric"]
    assert summary["seconds"] <= time.perf_counter() - start
