"""What the tool advises where memory, numbers, processes or workers fail is tried on the case that it was said of."""

from __future__ import annotations

import os
import re

import pytest
import torch
from torch import nn

from leansurgeon.errors import Diverged, LeanSurgeonError, OutOfMemory, UsageError
from leansurgeon.training import distributed, guards
from leansurgeon.training.loop import train
from leansurgeon.training.recipe import reading
from tests.support.training_standin import Dots, StandIn, Words, dot_model, recipe, word_model


def advised(hint: str) -> list[str]:
    """Every `A.B=C` behind a `--set`, of which each is to be tried."""
    return [text.rstrip(".,:") for text in re.findall(r"--set (\S+)", hint)]


def with_set(made, text):
    return reading.check_recipe(reading.plain(made), [text], "own")


class Greedy(nn.Module):
    """Has memory for so many samples, in training or in evaluation."""

    def __init__(self, inner: nn.Module, room: int, training: bool) -> None:
        super().__init__()
        self.inner, self.room, self.needs = inner, room, training

    def forward(self, x):
        if self.training is self.needs and len(x) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.inner(x)


def greedy(made, folder, room, training):
    loaded = word_model()
    loaded.model = Greedy(loaded.model, room, training)
    return train(made, folder, folder / "run", loaded=loaded, task=Words(), cpu=True, say=lambda text: None)


@pytest.mark.parametrize(("training", "key"), [(True, "train.micro_batch"), (False, "train.eval.batch")])
def test_too_little_memory(training, key, tmp_path):
    """Room for three samples of sixteen: advice after advice leads there, and the next but one is the last."""
    made, tried = recipe(eval={"every": "4st", "batch": 13}), []
    for number in range(4):
        try:
            summary = greedy(made, tmp_path / str(number), 3, training)
            break
        except OutOfMemory as error:
            (text,) = advised(error.hint)
            tried.append(text)
            made = with_set(made, text)
    assert summary.steps == 8 and tried == [f"{key}={n}" for n in ((8, 4, 2) if training else (6, 3))]


def test_too_little_memory_for_a_single_sample(tmp_path):
    made = recipe(micro_batch=1)
    with pytest.raises(OutOfMemory, match="micro batch of 1") as caught:
        greedy(made, tmp_path, 0, True)
    assert caught.value.hint == guards.LESS
    wanted = {"train.precision=bf16", "train.activation_checkpointing=true"}
    assert set(advised(caught.value.hint)) == wanted
    assert all(with_set(made, text) != made for text in wanted)


class Brittle(nn.Module):
    """Infinite once its weights have gone far, as those of a training do whose rate is too high."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dot_model().model

    def forward(self, x):
        far = max(float(parameter.detach().abs().max()) for parameter in self.parameters())
        return self.inner(x) * (float("inf") if far > 0.6 else 1.0)


def test_a_training_that_diverges(tmp_path):
    made, rates = recipe(optim={"lr": 0.09}, schedule={"name": "constant"}), [0.09]
    for number in range(4):
        try:
            run = tmp_path / str(number)
            loaded = StandIn(Brittle(), "pixel_values")
            train(made, run, run / "run", loaded=loaded, task=Dots(), cpu=True, say=lambda text: None)
            break
        except Diverged as error:
            (text,) = advised(error.hint)
            made = with_set(made, text)
            rates.append(made.train.optim.lr)
    assert 2 <= len(rates) < 5 and rates[1] == pytest.approx(0.03)


@pytest.mark.parametrize(
    "settings", [{"lora": {"rank": 2}}, {"precision": "fp16"}, {"optim": {"name": "lamb", "lr": 1e-3}}], ids=str
)
def test_fsdp2_with_what_it_does_not_bear(settings):
    made = recipe(parallel="fsdp2", **settings)
    with pytest.raises(UsageError) as caught:
        distributed.check_parallel(made.train, 2, lambda text: None)
    sets = advised(caught.value.hint)
    assert "train.parallel=ddp" in sets
    for text in sets:
        distributed.check_parallel(with_set(made, text).train, 2, lambda text: None)


class Spoilt(Dots):
    """A sample that cannot be read."""

    def batch(self, split, indices, *, seed, epoch):
        if split == "train" and 5 in indices:
            raise KeyError("no such pixel")
        return super().batch(split, indices, seed=seed, epoch=epoch)


def test_a_data_worker_that_fails(tmp_path):
    """Without workers the error comes with its own traceback."""
    made = recipe(workers=1)
    with pytest.raises(LeanSurgeonError, match="KeyError") as caught:
        train(made, tmp_path, tmp_path / "a", loaded=dot_model(), task=Spoilt(), cpu=True, say=lambda text: None)
    (text,) = advised(f"{caught.value.hint}")
    with pytest.raises(KeyError, match="no such pixel"):
        train(
            with_set(made, text), tmp_path, tmp_path / "b", loaded=dot_model(), task=Spoilt(), cpu=True,
            say=lambda text: None,
        )  # fmt: skip


def test_more_workers_than_cores(tmp_path):
    said, made = [], recipe(workers=len(os.sched_getaffinity(0)) + 1)
    train(made, tmp_path, tmp_path / "a", loaded=dot_model(), task=Dots(), cpu=True, say=said.append)
    (text,) = [text for line in said for text in advised(line) if "workers" in text]
    again = []
    train(
        with_set(made, text), tmp_path, tmp_path / "b", loaded=dot_model(), task=Dots(), cpu=True,
        say=again.append,
    )  # fmt: skip
    assert not any("workers share" in line for line in again)
