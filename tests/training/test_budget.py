"""A training by the clock: its length is that of the whole command, evaluations and saving included."""

import json
import re
import time

import numpy as np
import pytest
import torch

from leansurgeon.training import budget, guards
from leansurgeon.training.data_loader import SpreadSamples
from leansurgeon.training.loop import train
from leansurgeon.training.optimizer import Trainer
from tests.support.training_standin import Dots, Words, dot_model, losses, recipe, run_training, trained, word_model


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

    def __init__(self, clock: Clock) -> None:
        super().__init__(128, 2_000)
        self._clock = clock

    def batch(self, split, indices, *, seed, epoch):
        self._clock.now += 0.004 * len(indices)
        return super().batch(split, indices, seed=seed, epoch=epoch)


def timed(folder, clock, *, began=None, **settings):
    """The summary, the rows of metrics.jsonl and what was said of a training of 6 seconds."""
    said = []
    wanted = recipe(**({"duration": "6s", "eval": {"every": "2s", "batch": 4}, "log_every": 2} | settings))
    given = {"loaded": dot_model(), "task": Slow(clock), "cpu": True, "say": said.append, "began": began}
    found = train(wanted, folder / "no-model", folder / "run", **given).as_dict()
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return found, rows, said


def test_the_whole_command_takes_as_long_as_was_said(tmp_path, clock):
    """All 2,000 evaluation samples would take 8 s at a time, and the command began a second ago."""
    start = clock.now
    found, rows, said = timed(tmp_path, clock, began=start - 1.0)
    assert 5.4 < clock.now - start + 1.0 < 6.6
    # Of 4 ms each: 2 % of the time for one evaluation.
    assert {row["samples"] for row in rows if row["type"] == "eval"} == {30}
    assert found["task"]["eval_samples"] == 30 and found["steps"] > 20
    assert any(re.search(r"\bepoch\b.*\b8 steps\b", line, re.S) for line in said)


def test_a_number_of_samples_that_was_asked_for_is_kept(tmp_path, clock):
    found, rows, _ = timed(tmp_path, clock, duration="2s", eval={"every": "9s", "batch": 4, "samples": 30})
    assert {row["samples"] for row in rows if row["type"] == "eval"} == {30}
    assert found["task"]["data"]["eval_sampled_of"] == 2_000
    by_steps = {"duration": "2st", "eval": {"every": "1st", "batch": 4, "samples": 30}}  # as an experiment has it
    _, rows = trained(tmp_path / "counted", loaded=dot_model(), task=Dots(64, 2_000), **by_steps)
    assert [row["samples"] for row in rows if row["type"] == "eval"] == [30, 30, 30]


def test_timing_changes_nothing(tmp_path):
    """The same losses whether two steps were timed before or not."""
    _, plain = trained(tmp_path / "plain")
    options = {"loaded": word_model(), "task": Words(), "cpu": True, "say": lambda text: None}
    train(recipe(), tmp_path, tmp_path / "timed", **options, began=time.perf_counter())
    rows = [json.loads(line) for line in (tmp_path / "timed" / "metrics.jsonl").read_text().splitlines()]
    assert losses(rows) == losses(plain) and losses(rows, "eval") == losses(plain, "eval")


def test_a_sample_of_the_evaluation_split_is_spread_over_it():
    class Placed(Dots):
        def batch(self, split, indices, **rest):
            return super().batch(split, indices, **rest) | {"_index": torch.as_tensor(np.asarray(indices))}

    task = SpreadSamples(Placed(64, 100), 10)
    assert task.size("eval") == 10 and task.size("train") == 64
    shown = task.batch("eval", np.arange(10), seed=0, epoch=0)
    wanted = Dots(64, 100).batch("eval", np.arange(0, 100, 11), seed=0, epoch=0)
    assert torch.equal(shown["pixel_values"], wanted["pixel_values"])
    assert shown["_index"].tolist() == [*range(10)]  # of those that are shown, as correlations count them
    with pytest.raises(IndexError):
        task.batch("eval", np.array([10]), seed=0, epoch=0)


def test_a_training_by_the_clock_foretells_its_steps(tmp_path, clock):
    """A step of 16 samples takes 64 ms; 6 s without evaluations have room for some 80, and 900 would get all."""
    optim = {"lr": 1e-3, "full_steps": 900}
    found, rows, said = timed(tmp_path, clock, began=clock.now, optim=optim, schedule={"name": "constant"})
    rate = next(row["lr"] for row in rows if row["type"] == "train")
    assert rate == pytest.approx(1e-3 * (found["steps"] / 900) ** 0.5, rel=0.15)
    assert any(f"{rate:.2g} instead of 0.001" in line for line in said)


def test_the_pace_is_known_long_before_the_first_line(tmp_path, clock, monkeypatch):
    """With slow steps and few lines, the first line would come after the warm-up, and all before it trained at zero."""
    rates, real = [], Trainer.step

    def step(self, at, batches):
        rates.append(self.lr(at))
        return real(self, at, batches)

    monkeypatch.setattr(Trainer, "step", step)
    few = {"log_every": 1000, "eval": {"every": "100ep", "batch": 4, "samples": 30}}
    found, rows, _ = timed(tmp_path, clock, schedule={"name": "triangle", "base": 0.0}, **few)
    assert len(rates) == found["steps"] > 50
    assert max(rates) > 0.5 * 1e-2 and rates[-1] < 0.2 * max(rates)
    assert sum(rate > 0 for rate in rates) >= len(rates) - 3
    assert rows[-1]["type"] == "eval" and rows[-1]["step"] == found["steps"]


def test_a_time_that_cannot_be_kept_is_said(tmp_path, clock):
    """16 evaluation samples take 64 ms, and are looked at before and after one step of 64 ms."""
    _, _, said = timed(tmp_path, clock, began=clock.now - 3.0, duration="2s")
    assert any("2s cannot be kept" in line for line in said)
    assert not any("there is time for" in line for line in said)  # not beside a forecast that says it can
    assert budget.beyond(60.0, 3.0, 20.0, 5.0) is None
    assert "64s" in budget.beyond(50.0, 4.0, 40.0, 20.0).replace("1m04s", "64s")


class Ragged(Words):
    """Texts of which some are short and the others long; whoever asks for a batch of them is written down."""

    def __init__(self, short: int) -> None:
        super().__init__()
        self._lengths, self.asked = np.array([5] * short + [90] * (63 - short) + [120]), []

    def lengths(self, split):
        return self._lengths

    def batch(self, split, indices, **rest):
        self.asked.append(self._lengths[indices].max())
        return super().batch(split, indices, **rest)


@pytest.mark.parametrize("short", [1, 62])
def test_training_by_length_begins_with_whole_batches_whatever_the_lengths(short, tmp_path, monkeypatch):
    monkeypatch.setattr(guards, "PROBED", ("cpu",))
    task = Ragged(short)
    assert run_training(tmp_path, task=task, order="by-length", batch=64, micro_batch=16, duration="1st").steps == 1
    assert task.asked[0] == 120  # whether the longest texts fit is tried first
