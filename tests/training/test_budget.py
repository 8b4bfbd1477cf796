"""A training by the clock: its length is that of the whole command, evaluations and saving included."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from leansurgeon.training import budget, schedule, state
from leansurgeon.training.data_loader import SpreadSamples
from leansurgeon.training.loop import train
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
    assert seen == {30}  # of 4 ms each: 2 % of the time for one evaluation
    assert found["task"]["eval_samples"] == 30 and found["steps"] > 20
    assert any(re.search(r"\bepoch\b.*\b8 steps\b", line, re.S) for line in said)


def test_a_number_of_samples_that_was_asked_for_is_kept(tmp_path, clock):
    found, rows, _ = timed(tmp_path, clock=clock, duration="2s", eval={"every": "9s", "batch": 4, "samples": 30})
    assert {row["samples"] for row in rows if row["type"] == "eval"} == {30}
    assert found["task"]["data"]["eval_sampled_of"] == 2_000
    by_steps = {"duration": "2st", "eval": {"every": "1st", "batch": 4, "samples": 30}}  # as an experiment has it
    _, rows, _ = timed(tmp_path / "counted", began=None, task=Dots(64, 2_000), **by_steps)
    assert [row["samples"] for row in rows if row["type"] == "eval"] == [30, 30, 30]


def test_timing_changes_nothing(tmp_path):
    """The same losses whether two steps were timed before or not."""
    losses = []
    for name, began in (("timed", time.perf_counter()), ("plain", None)):
        _, rows, _ = timed(tmp_path / name, began=began, task=Dots(), duration="8st", eval={"every": "4st", "batch": 4})
        losses.append([row["loss"] for row in rows])
    assert losses[0] == losses[1]


def test_a_sample_of_the_evaluation_split_is_spread_over_it():
    task = SpreadSamples(Dots(64, 100), 10)
    assert task.size("eval") == 10 and task.size("train") == 64
    whole = Dots(64, 100).batch("eval", np.arange(100), seed=0, epoch=0)["pixel_values"]
    some = task.batch("eval", np.arange(10), seed=0, epoch=0)["pixel_values"]
    assert torch.equal(some, whole[np.arange(0, 100, 11)])
    with pytest.raises(IndexError):
        task.batch("eval", np.array([10]), seed=0, epoch=0)

    class Placed(Dots):
        def batch(self, split, indices, **rest):
            return super().batch(split, indices, **rest) | {"_index": torch.as_tensor(np.asarray(indices))}

    shown = SpreadSamples(Placed(64, 100), 10).batch("eval", np.array([3, 9]), seed=0, epoch=0)
    assert shown["_index"].tolist() == [3, 9]  # of those that are shown, as correlations count them


@pytest.mark.parametrize(("steps", "share"), [(1, 1 / 6), (9, 0.5), (36, 1.0), (400, 1.0)])
def test_few_steps_get_less_of_the_rate(steps, share):
    optim = {"lr": 1e-3, "full_steps": 36}
    made = schedule.make_plan(recipe(duration=f"{steps}st", optim=optim, schedule={"name": "constant"}).train, 64, 1)
    assert made.peak == pytest.approx(1e-3 * share) and made.lr(0) == made.peak
    by_the_clock = schedule.make_plan(recipe(duration="9s", optim=optim).train, 64, 1)
    assert by_the_clock.peak == 1e-3  # nothing is foretold yet
    assert replace(by_the_clock, expected=steps).peak == pytest.approx(1e-3 * share)


def test_a_training_by_the_clock_foretells_its_steps(tmp_path, clock):
    """A step of 16 samples takes 64 ms; 6 s without evaluations have room for some 80, and 900 would get all."""
    optim = {"lr": 1e-3, "full_steps": 900}
    found, rows, said = timed(tmp_path, began=clock.now, clock=clock, optim=optim, schedule={"name": "constant"})
    rate = next(row["lr"] for row in rows if row["type"] == "train")
    assert rate == pytest.approx(1e-3 * (found["steps"] / 900) ** 0.5, rel=0.15)
    assert any(f"{rate:.2g} instead of 0.001" in line for line in said)


def test_a_time_that_cannot_be_kept_is_said(tmp_path, clock):
    """16 evaluation samples take 64 ms, and are looked at before and after one step of 64 ms."""
    _, _, said = timed(tmp_path, began=clock.now - 3.0, clock=clock, duration="2s")
    assert any("2s cannot be kept" in line for line in said)
    assert not any("there is time for" in line for line in said)  # not beside a forecast that says it can
    assert budget.beyond(60.0, 3.0, 20.0, 5.0) is None
    assert "64s" in budget.beyond(50.0, 4.0, 40.0, 20.0).replace("1m04s", "64s")


@pytest.mark.parametrize("short", [1, 40, 62])
def test_a_batch_of_usual_length_and_the_longest_are_whole(short):
    """Of 64 texts, some short and the others long, whatever their share, in batches of 64 and of 16."""
    lengths = np.array([5] * short + [90] * (63 - short) + [120])
    shown = SimpleNamespace(size=lambda _: 64, lengths=lambda _: lengths, batch=lambda _, rows, **__: {"rows": rows})
    for group in (64, 16):
        plan = SimpleNamespace(group=group, processes=1, micro=4)
        run = SimpleNamespace(
            train=recipe(order="by-length").train, plan=plan, task=shown, group=SimpleNamespace(rank=0),
            device=torch.device("cpu"), trainer=SimpleNamespace(mixing=None),
        )  # fmt: skip
        with mock.patch.object(state.data_loader, "to_device", lambda batch, _: batch):
            usual = [state.first_batch(run, number)["rows"] for number in range(group // 4)]
            longest = state.first_batch(run, longest=True)["rows"]
        assert len(set(np.concatenate(usual))) == group and lengths[longest].max() == 120
