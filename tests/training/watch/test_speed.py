"""Step time, throughput, data wait and ETA under a clock that only the test moves."""

import random
import statistics

import pytest
import torch

from leansurgeon.training import evaluator, loop, observe, state
from leansurgeon.training.observe import Progress
from tests.support.training_standin import StandIn, WordModel, Words, trained

FETCH, FORWARD, SCORE = 0.25, 0.75, 0.5  # seconds of a training batch, of its forward pass, of an evaluation batch


@pytest.mark.parametrize("seed", range(3))
def test_the_median_step_is_that_of_all_steps(seed):
    draw = random.Random(seed)
    windows = [(float(draw.randint(1, 7)), draw.random()) for _ in range(draw.randint(1, 9))]
    every = [spent / steps for steps, spent in windows for _ in range(int(steps))]
    assert state.median_step(windows) == pytest.approx(statistics.median(every))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    for module in (loop, evaluator, state, observe):
        monkeypatch.setattr(module, "time", made)
    return made


def test_every_figure_of_speed_is_what_the_clock_says(clock, tmp_path, monkeypatch):
    class Timed(Words):
        def batch(self, split, indices, **rest):
            clock.now += FETCH if split == "train" else SCORE
            return super().batch(split, indices, **rest)

    class Model(WordModel):
        def forward(self, ids_BT):
            clock.now += FORWARD if self.training else 0.0
            return super().forward(ids_BT)

    shown = []
    monkeypatch.setattr(Progress, "step", lambda self, done, **figures: shown.append({"done": done} | figures))
    settings = {"log_every": 2, "micro_batch": 8, "checkpoint": {"every": "3st"}}  # two micro batches a step
    summary, rows = trained(tmp_path, loaded=StandIn(Model()), task=Timed(), **settings)
    step = 2 * (FETCH + FORWARD)
    evaluation = 4 * SCORE  # 13 samples, four at a time
    assert summary["step_ms"] == pytest.approx(1000 * step) and summary["data_wait"] == pytest.approx(0.25)
    assert summary["throughput"] == pytest.approx(16 * 8 / step) and summary["throughput_unit"] == "tokens/s"
    of_steps = [row for row in rows if row["type"] == "train"]
    assert [(row["step_ms"], row["data_wait"]) for row in of_steps] == [(2000.0, 0.25)] * 4
    assert shown[0]["rate"] == pytest.approx(16 * 8 / step) and shown[0]["waiting"] == pytest.approx(0.25)
    # What an evaluation takes is known from the fourth step's on; then the last one is left.
    assert [figures["done"] for figures in shown] == [2, 4, 6, 8]
    assert [figures["eta"] for figures in shown] == pytest.approx([6 * step, 4 * step, 2 * step + evaluation, 0.0])


def test_rows_of_a_checkpoint_are_read_and_not_counted_as_taken(clock):
    seen = observe.Window([torch.ones(3)])
    seen.begin()
    seen.add(torch.zeros(3))
    assert seen.values() == [[1.0] * 3, [0.0] * 3]
    assert seen.look()[1] == 1
