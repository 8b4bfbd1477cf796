"""What stops a training, or keeps it going: no gain, a loss that is no number, too little memory; and what is advised
there is tried.
"""

from __future__ import annotations

import json
import math
import os
import re

import pytest
import torch
from torch import nn

from leansurgeon.errors import Diverged, OutOfMemory, UsageError
from leansurgeon.training import data_loader, distributed, guards
from leansurgeon.training.loop import train
from leansurgeon.training.recipe import reading
from tests.support import training_interrupted as cut
from tests.support.training_standin import (
    Dots,
    StandIn,
    Words,
    dot_model,
    losses,
    recipe,
    run_training,
    trained,
    word_model,
)


class Poisoned(Words):
    """One training batch, by its samples, gives no number; or the loss is one and its gradient is none."""

    bad = tuple(data_loader.epoch_order(0, 1, 64)[:3])

    def __init__(self, *, gradient_alone: bool = False) -> None:
        super().__init__()
        self._gradient_alone = gradient_alone

    def batch(self, split, indices, **rest):
        batch = super().batch(split, indices, **rest)
        batch["_bad"] = torch.tensor(float(split == "train" and tuple(indices)[:3] == self.bad))
        return batch

    def score(self, logits, batch, **options):
        score = super().score(logits, batch, **options)
        if not self._gradient_alone:
            return score._replace(loss_sum=score.loss_sum / (1 - batch["_bad"]))
        return score._replace(loss_sum=score.loss_sum + (0 * logits.sum()).abs().sqrt()) if batch["_bad"] else score


def test_a_bad_step_is_left_out_where_the_recipe_says_so(tmp_path):
    with pytest.raises(Diverged, match="step 5 of 8"):
        run_training(tmp_path / "stop", task=Poisoned())
    with pytest.raises(Diverged, match=r"gradient norm is (nan|inf) at step 5 of 8"):
        run_training(tmp_path / "torn", task=Poisoned(gradient_alone=True))
    said = []
    ema = {"decay": 0.8}  # it would count the weights of a step that was left out twice
    skipped, rows = trained(tmp_path / "skip", task=Poisoned(), nan="skip", ema=ema, say=said.append)
    assert skipped["left_out_steps"] == [5] and any("skipped" in line for line in said)
    assert all(math.isfinite(loss) for loss in losses(rows))
    settings = {"nan": "rollback", "log_every": 4, "checkpoint": {"every": "3st"}, "ema": ema}
    back, again = trained(tmp_path / "back", task=Poisoned(), **settings)
    assert back["left_out_steps"] == [5] and back["final"] == skipped["final"]
    a, b = (cut.weights(tmp_path / name, "last") for name in ("skip", "back"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert [row["step"] for row in again if row["type"] == "train"] == [4, 8]


def test_rolling_back_has_an_end(tmp_path):
    settings = {"optim": {"lr": 1e30}, "clip_grad": 0.0, "duration": "40st", "checkpoint": {"every": "1st"}}
    with pytest.raises(Diverged, match="last of 3 rollbacks"):
        run_training(tmp_path, nan="rollback", **settings)


class Greedy(nn.Module):
    """A model for which only so many samples fit in memory, in training or in evaluation, and fewer beside its
    gradients.
    """

    def __init__(self, most: int, *, beside: int = 99, training: bool = True) -> None:
        super().__init__()
        self.most, self.inner, self.beside, self.needs = most, word_model().model, beside, training

    def forward(self, x):
        gradients = any(parameter.grad is not None for parameter in self.parameters())
        if self.training is self.needs and len(x) > (min(self.most, self.beside) if gradients else self.most):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.inner(x)


@pytest.fixture
def probed(monkeypatch):
    """Whether a step fits is tried before the first one, as on a GPU."""
    monkeypatch.setattr(guards, "PROBED", ("cpu",))


def test_the_micro_batch_shrinks_and_the_global_batch_stays(probed, tmp_path):
    _, plain = trained(tmp_path / "plain")
    said = []
    summary, rows = trained(tmp_path / "greedy", loaded=StandIn(Greedy(5)), say=said.append)
    assert summary["micro_batch"] == 4 and any(re.search(r"\b8\b.*\bmemory; 4 x 4\b", line, re.S) for line in said)
    assert losses(rows) == pytest.approx(losses(plain), abs=1e-5)
    # The second micro batch of a step has to fit beside the gradients of the first.
    assert run_training(tmp_path / "beside", loaded=StandIn(Greedy(5, beside=2))).micro_batch == 2


def test_a_model_that_never_fits_is_one_sentence(probed, tmp_path):
    with pytest.raises(OutOfMemory, match="micro batch of 1") as error:
        run_training(tmp_path, loaded=StandIn(Greedy(0)))
    assert error.value.exit_code == 4 and not (tmp_path / "run").exists()
    pictures = nn.Sequential(nn.Flatten(), Greedy(0))
    with pytest.raises(OutOfMemory, match="micro batch of 2"):  # pairs that are mixed
        run_training(tmp_path, loaded=StandIn(pictures, "pixel_values"), task=cut.Pictures(), mixup=0.4)


def _shrink_on(folder) -> None:
    guards.PROBED = ("cpu",)
    run_training(folder, loaded=StandIn(Greedy(5 if os.environ["RANK"] == "1" else 99)))


def test_one_process_short_of_memory_shrinks_all(tmp_path):
    assert cut.processes(2, _shrink_on, tmp_path) == [0, 0]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["micro_batch"] == 4


# -- advice that is followed -----------------------------------------------------------------------


def advised(hint: str) -> list[str]:
    """Every `A.B=C` behind a `--set`, of which each is to be tried."""
    return [text.rstrip(".,:") for text in re.findall(r"--set (\S+)", hint)]


def with_set(made, text):
    return reading.check_recipe(reading.plain(made), [text], "own")


def follow(made, folder, error, make_model, task) -> tuple[list[str], object]:
    """Train, and where that fails do what is advised, up to three times; what was advised, and the summary."""
    followed = []
    for number in range(4):
        try:
            place = folder / str(number)
            options = {"loaded": make_model(), "task": task, "cpu": True, "say": lambda text: None}
            return followed, train(made, place, place / "run", **options)
        except error as caught:
            (text,) = advised(caught.hint)
            followed.append(text)
            made = with_set(made, text)
    pytest.fail(f"It failed after {followed}, too.")


@pytest.mark.parametrize(("training", "sizes"), [(True, (8, 4, 2)), (False, (6, 3))])
def test_too_little_memory(training, sizes, tmp_path):
    """Room for three samples of sixteen: advice after advice leads there."""
    made = recipe(eval={"every": "4st", "batch": 13})
    followed, summary = follow(made, tmp_path, OutOfMemory, lambda: StandIn(Greedy(3, training=training)), Words())
    key = "train.micro_batch" if training else "train.eval.batch"
    assert summary.steps == 8 and followed == [f"{key}={size}" for size in sizes]


def test_too_little_memory_for_a_single_sample(tmp_path):
    made = recipe(micro_batch=1)
    with pytest.raises(OutOfMemory, match="micro batch of 1") as caught:
        run_training(tmp_path, loaded=StandIn(Greedy(0)), micro_batch=1)
    sets = advised(caught.value.hint)
    assert set(sets) == {"train.precision=bf16", "train.activation_checkpointing=true"}
    assert all(with_set(made, text) != made for text in sets)


class Brittle(nn.Module):
    """Infinite once its weights have gone far, as those of a training do whose rate is too high."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dot_model().model

    def forward(self, x):
        far = max(float(parameter.detach().abs().max()) for parameter in self.parameters())
        return self.inner(x) * (float("inf") if far > 0.6 else 1.0)


def test_a_training_that_diverges(tmp_path):
    made = recipe(optim={"lr": 0.09}, schedule={"name": "constant"})
    followed, _ = follow(made, tmp_path, Diverged, lambda: StandIn(Brittle(), "pixel_values"), Dots())
    assert followed[0] == "train.optim.lr=0.03"


@pytest.mark.parametrize(
    "settings", [{"lora": {"rank": 2}}, {"precision": "fp16"}, {"optim": {"name": "lamb", "lr": 1e-3}}], ids=str
)
def test_fsdp2_with_what_it_does_not_bear(settings):
    made = recipe(parallel="fsdp2", **settings)
    with pytest.raises(UsageError, match="fsdp2") as caught:
        distributed.check_parallel(made.train, 2, lambda text: None)
    sets = advised(caught.value.hint)
    assert "train.parallel=ddp" in sets
    for text in sets:
        distributed.check_parallel(with_set(made, text).train, 2, lambda text: None)
