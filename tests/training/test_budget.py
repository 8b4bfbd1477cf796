"""A training by the clock: its length is that of the whole command, evaluations and saving included."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
import torch

from leansurgeon.training.data.limit import Sampled
from leansurgeon.training.train import train
from tests.support.training_standin import Dots, dot_model, recipe


class Clock:
    """A clock that only batches move: a busy machine changes nothing."""

    def __init__(self) -> None:
        self.now = time.perf_counter()

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", made)
    return made


class Slow(Dots):
    """Every batch costs as much as it has samples: 4 ms each, also in evaluation."""

    clock = None

    def batch(self, split, indices, *, seed, epoch):
        if self.clock:
            self.clock.now += 0.004 * len(indices)
        return super().batch(split, indices, seed=seed, epoch=epoch)


def timed(folder, *, began=None, task=None, clock=None, **settings):
    said = []
    wanted = recipe(**({"duration": "6s", "eval": {"every": "2s", "batch": 4}, "log_every": 2} | settings))
    task = task or Slow(128, 2_000)
    task.clock = clock
    given = {"loaded": dot_model(), "task": task, "cpu": True, "say": said.append, "began": began}
    train(wanted, folder / "no-model", folder / "run", **given)
    found = json.loads((folder / "run" / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return found, rows, said


def test_the_whole_command_takes_as_long_as_was_said(tmp_path, clock):
    """All 2,000 evaluation samples would take 8 s at a time, and the command began a second ago."""
    start = clock.now
    found, rows, said = timed(tmp_path, began=start - 1.0, clock=clock)
    assert 5.4 < clock.now - start + 1.0 < 6.6
    seen = {row["samples"] for row in rows if row["type"] == "eval"}
    assert seen == {60}  # of 4 ms each: 4 % of the time for one evaluation
    assert found["task"]["eval_samples"] == next(iter(seen)) and found["steps"] > 20
    assert any("an epoch of 8 steps" in line for line in said)


def test_a_number_of_samples_that_was_asked_for_is_kept(tmp_path, clock):
    found, rows, _ = timed(tmp_path, clock=clock, duration="2s", eval={"every": "9s", "batch": 4, "samples": 30})
    assert {row["samples"] for row in rows if row["type"] == "eval"} == {30}
    assert found["task"]["data"]["eval_sampled_of"] == 2_000


def test_timing_changes_nothing(tmp_path):
    """The same losses whether two steps were timed before or not."""
    losses = []
    for name, began in (("timed", time.perf_counter()), ("plain", None)):
        _, rows, _ = timed(tmp_path / name, began=began, task=Dots(), duration="8st", eval={"every": "4st", "batch": 4})
        losses.append([row["loss"] for row in rows])
    assert losses[0] == losses[1]


def test_a_sample_of_the_evaluation_split_is_spread_over_it():
    task = Sampled(Dots(64, 100), 10)
    assert task.size("eval") == 10 and task.size("train") == 64
    whole = Dots(64, 100).batch("eval", np.arange(100), seed=0, epoch=0)["pixel_values"]
    some = task.batch("eval", np.arange(10), seed=0, epoch=0)["pixel_values"]
    assert torch.equal(some, whole[np.arange(0, 100, 11)])
    with pytest.raises(IndexError):
        task.batch("eval", np.array([10]), seed=0, epoch=0)
