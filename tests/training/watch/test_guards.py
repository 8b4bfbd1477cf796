"""What stops a training, or keeps it going: no gain, a loss that is no number, too little memory."""

from __future__ import annotations

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from leansurgeon.errors import Diverged, OutOfMemory
from leansurgeon.training import data_loader, guards
from leansurgeon.training.loop import train
from leansurgeon.training.processes.agree import ProcessGroup
from leansurgeon.training.schedule import make_plan
from tests.support import training_interrupted as cut
from tests.support.training_standin import Words, losses, recipe, trained, word_model


class _Poisoned(Words):
    """One training batch, by its samples, gives no number."""

    def batch(self, split, indices, **rest):
        batch = super().batch(split, indices, **rest)
        batch["_bad"] = torch.tensor(float(split == "train" and tuple(indices)[:3] == self.bad))
        return batch

    bad = tuple(data_loader.epoch_order(0, 1, 64)[:3])

    def score(self, logits, batch, **options):
        score = super().score(logits, batch, **options)
        return score._replace(loss_sum=score.loss_sum / (1 - batch["_bad"]))


def test_a_bad_step_is_left_out_where_the_recipe_says_so(tmp_path):
    with pytest.raises(Diverged, match="step 5 of 8"):
        trained(tmp_path / "stop", task=_Poisoned())
    said = []
    ema = {"decay": 0.8}  # it would count the weights of a step that was left out twice
    skipped, rows = trained(tmp_path / "skip", task=_Poisoned(), nan="skip", ema=ema, say=said.append)
    assert skipped["left_out_steps"] == [5] and any("left out" in line for line in said)
    settings = {"nan": "rollback", "log_every": 4, "checkpoint": {"every": "3st"}, "ema": ema}
    back, again = trained(tmp_path / "back", task=_Poisoned(), **settings)
    assert back["left_out_steps"] == [5] and back["final"] == skipped["final"]
    a, b = (torch.load(tmp_path / n / "run" / "last" / "weights.pt", weights_only=True) for n in ("skip", "back"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert [row["step"] for row in again if row["type"] == "train"] == [4, 8]
    assert all(math.isfinite(loss) for loss in losses(rows))


class _Torn(_Poisoned):
    """The loss of that batch is a number, and its gradient is none."""

    def score(self, logits, batch, **options):
        score = Words.score(self, logits, batch, **options)
        return score._replace(loss_sum=score.loss_sum + (0 * logits.sum()).abs().sqrt()) if batch["_bad"] else score


def test_a_gradient_that_is_no_number_counts_where_the_loss_is_one(tmp_path):
    with pytest.raises(Diverged, match=r"gradient norm is (nan|inf) at step 5 of 8"):
        trained(tmp_path, task=_Torn())


def test_rolling_back_has_an_end(tmp_path):
    with pytest.raises(Diverged, match="last of 3 rollbacks"):
        trained(
            tmp_path, optim={"lr": 1e30}, clip_grad=0.0, duration="40st", nan="rollback", checkpoint={"every": "1st"}
        )


class _Greedy(nn.Module):
    """A model for which only so many samples fit in memory, and fewer beside its gradients."""

    def __init__(self, most: int, inner: nn.Module, *, beside: int = 99) -> None:
        super().__init__()
        self.most, self.inner, self.beside = most, inner, beside

    def forward(self, x):
        gradients = any(parameter.grad is not None for parameter in self.parameters())
        if self.training and len(x) > (min(self.most, self.beside) if gradients else self.most):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.inner(x)


def test_the_micro_batch_shrinks_and_the_global_batch_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(guards, "PROBED", ("cpu",))
    _, plain = trained(tmp_path / "plain")
    loaded, said = word_model(), []
    loaded.model = _Greedy(5, loaded.model)
    summary, rows = trained(tmp_path / "greedy", loaded=loaded, say=said.append)
    assert summary["micro_batch"] == 4 and any(re.search(r"\b8\b.*\bmemory; 4 x 4\b", line, re.S) for line in said)
    assert losses(rows) == pytest.approx(losses(plain), abs=1e-5)
    loaded = word_model()
    loaded.model = _Greedy(0, loaded.model)
    with pytest.raises(OutOfMemory, match="micro batch of 1") as error:
        trained(tmp_path / "never", loaded=loaded)
    assert error.value.exit_code == 4 and not (tmp_path / "never" / "run").exists()
    monkeypatch.setattr(guards, "PROBED", ())
    with pytest.raises(OutOfMemory, match="micro batch of 16") as error:
        trained(tmp_path / "late", loaded=loaded)
    assert "train.micro_batch=8" in error.value.hint


def test_pairs_that_are_mixed_and_do_not_fit_end_in_one_sentence(monkeypatch):
    monkeypatch.setattr(guards, "PROBED", ("cpu",))
    monkeypatch.setattr(guards, "_fits", lambda run: False)
    mixed = recipe(mixup=0.4).train
    run = SimpleNamespace(train=mixed, plan=make_plan(mixed, 64, 1, micro_limit=2), task=Words(), group=ProcessGroup())
    run.device = torch.device("cpu")
    with pytest.raises(OutOfMemory, match="micro batch of 2"):
        guards.fit_memory(run)


def test_the_second_micro_batch_of_a_step_has_to_fit_beside_the_gradients_of_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(guards, "PROBED", ("cpu",))
    loaded = word_model()
    loaded.model = _Greedy(5, loaded.model, beside=2)
    assert trained(tmp_path, loaded=loaded)[0]["micro_batch"] == 2


def _shrink_on(folder) -> None:
    import os

    guards.PROBED = ("cpu",)
    loaded = word_model()
    loaded.model = _Greedy(5 if os.environ["RANK"] == "1" else 99, loaded.model)
    train(recipe(), folder, folder / "run", loaded=loaded, task=Words(), cpu=True, say=lambda text: None)


def test_one_process_short_of_memory_shrinks_all(tmp_path):
    assert cut.processes(2, _shrink_on, tmp_path) == [0, 0]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["micro_batch"] == 4
