"""The loop against a bare PyTorch loop, and what it promises about accumulation, errors and files."""

import json
import math

import pytest
import torch
from torch.nn import functional as F
from transformers import get_scheduler

from leansurgeon.errors import Diverged, LeanSurgeonError, UsageError
from leansurgeon.training import data_loader, evaluator
from leansurgeon.training.loop import train
from tests.support.training_standin import Dots, Words, dot_model, losses, recipe, run_training, trained, word_model


def test_losses_equal_those_of_a_bare_loop(tmp_path):
    loaded = word_model()
    summary, rows = trained(tmp_path, loaded=loaded, seed=3)
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
    for step in range(8):
        epoch, start = step // 4, step % 4 * 16
        order = data_loader.epoch_order(3, epoch, 64)
        batch = task.batch("train", order[start : start + 16], seed=3, epoch=epoch)
        logits = model(batch["input_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        schedule.step()
        adamw.zero_grad()
        expected.append(loss.item())
    assert losses(rows) == pytest.approx(expected, abs=1e-6)
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

    run_training(tmp_path, task=Watched(), order="as-stored", micro_batch=8, duration="2ep")
    assert read[-128:] == [*range(64)] * 2


def test_evaluation_before_the_first_step_best_and_last(tmp_path):
    loaded = word_model()
    summary, rows = trained(tmp_path, loaded=loaded)
    evals = [row for row in rows if row["type"] == "eval"]
    assert [row["step"] for row in evals] == [0, 4, 8]
    assert summary["before"]["loss"] == evals[0]["loss"]
    assert summary["best"]["metric"] == min(row["metric"] for row in evals[1:])  # perplexity: lower is better
    assert summary["final"]["metric"] == pytest.approx(math.exp(summary["final"]["loss"]))
    last = torch.load(tmp_path / "run" / "last" / "weights.pt", weights_only=True)
    assert all(torch.equal(last[name], value) for name, value in loaded.model.state_dict().items())
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"last", "metrics.jsonl", "model", "recipe.yaml", "summary.json"}
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert summary["memory"]["kind"] == "process peak RSS" and summary["memory"]["bytes"] > 2**24
    assert summary["status"] == "done"


def test_a_task_that_scores_too_few_samples_is_an_error(tmp_path):
    class Careless(Dots):
        def score(self, logits, batch, **options):
            return super().score(logits[:3], {"labels": batch["labels"][:3]})

    with pytest.raises(LeanSurgeonError, match=r"scored \d+ samples of 13"):
        run_training(tmp_path, loaded=dot_model(), task=Careless())


def test_an_exploding_run_is_stopped(tmp_path):
    with pytest.raises(Diverged, match="loss") as error:
        run_training(tmp_path, optim={"lr": 1e30}, clip_grad=0.0, duration="40st")
    assert error.value.hint.startswith("Lower train.optim.lr (it is 1e+30)")  # a third of it would be no advice


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    thesis = tmp_path / "run" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("three years of work")
    for replace in (False, True):  # `replace` gives up runs, and nothing else
        with pytest.raises(UsageError, match="not empty"):
            run_training(tmp_path, replace=replace)
    assert thesis.exists()
    run_training(tmp_path / "other", duration="1st")
    assert run_training(tmp_path / "other", replace=True).steps == 8


def test_a_training_that_is_refused_leaves_no_folder(tmp_path):
    (tmp_path / "model").mkdir()  # no config.json in it
    with pytest.raises(LeanSurgeonError):
        train(recipe(), tmp_path / "model", tmp_path / "run", task=Words(), cpu=True, say=lambda text: None)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("curve", "falls"),
    [
        ([2.0, 1.0, 0.67, 0.5, 0.35, 0.2, 0.1, 0.02], True),
        ([2.0, 1.0, 0.5, 0.3, 0.22, 0.21, 0.205, 0.204], False),
        ([2.0, 1.0, 0.5, 0.4, 0.45, 0.5], False),  # overfitted
        ([3.0, 1.0], False),  # too short to say
    ],
)
def test_a_training_that_ended_too_early_is_known_by_its_losses(curve, falls):
    assert evaluator.still_falling(curve) is falls


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_accumulation_changes_nothing_though_token_counts_differ(tmp_path, precision):
    tolerance = 1e-5 if precision == "fp32" else 3e-2
    _, whole = trained(tmp_path / "whole", precision=precision)
    _, parts = trained(tmp_path / "parts", precision=precision, micro_batch=4)
    for kind in ("train", "eval"):
        assert losses(parts, kind) == pytest.approx(losses(whole, kind), abs=tolerance)
