"""What is counted on the way goes on after an interruption, and is judged by the metric."""

from functools import partial

import pytest
import torch

from leansurgeon.errors import Stopped
from leansurgeon.tasks.base import Metric
from leansurgeon.training import distributed, evaluator
from leansurgeon.training.optimizer import Trainer
from leansurgeon.training.recipe.schema import EarlyStopping
from leansurgeon.training.runs import checkpoint
from leansurgeon.training.runs.summary import Scores
from leansurgeon.training.state import History
from tests.support import training_interrupted as cut


def interrupt(folder, batch: int, **settings) -> None:
    with pytest.raises(Stopped):
        cut.run(folder, cut.Interrupter("train", batch, cut.TERM), **settings)


GOES_ON = {
    "lamb": ({"optim": {"name": "lamb", "lr": 1e-2}}, 4 * 9),  # counts its steps for a whole group
    "half precision": ({"precision": "fp16"}, 4 * 9),
    "ramp": ({"batch_ramp": {"start": 4, "until": 0.75}, "mixup": 0.0, "cutmix": 0.0}, 9),
    # The first evaluation is the best; without what was counted before, two more would be waited for.
    "patience": (
        {
            "optim": {"lr": 1e-12},
            "duration": "40st",
            "eval": {"every": "2st", "batch": 13},
            "early_stopping": {"patience": 3, "min_delta": 0.5},
        },
        4 * 6,
    ),
}


@pytest.mark.parametrize("case", GOES_ON)
def test_what_was_counted_goes_on(case, tmp_path, monkeypatch):
    """The scale of half precision has to come down at the start and rises every second step: no two steps share it."""
    if case == "half precision":
        scaler = partial(torch.amp.GradScaler, "cpu", init_scale=2.0**20, growth_interval=2)
        monkeypatch.setattr(distributed, "make_scaler", lambda *_: scaler())
    settings, batch = GOES_ON[case]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    summary = cut.run(whole, **settings)
    interrupt(parts, batch, **settings)
    assert (
        cut.run(parts, resume="auto", **settings)["stopped_early"] == summary["stopped_early"] == (case == "patience")
    )
    assert case != "patience" or summary["steps"] == 8  # the first is the best, three bring nothing
    cut.assert_same(whole, parts)


def test_a_timed_training_goes_on_at_its_place_in_the_schedule(tmp_path, monkeypatch):
    settings = {"duration": "1h", "schedule": {"name": "triangle"}, "log_every": 3, "ema": None}
    interrupt(tmp_path, 4 * 8, **settings)
    saved = checkpoint.read_state(checkpoint.newest(tmp_path / "run"))["pace"]
    assert saved["step"] > 0 and saved["per_step"] > 0
    found = []

    def step(self, at, batches):
        found.append(self.pace.state())
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "step", step)
    with pytest.raises(KeyboardInterrupt):
        cut.run(tmp_path, resume="auto", **settings)
    assert found == [saved]


# higher is better, min_delta, best (metric, loss), new (metric, loss): whether it is better, whether it is a gain
JUDGED = {
    "higher": (True, 0.0, (0.5, 1.0), (0.6, 2.0), True, True),
    "lower": (True, 0.0, (0.5, 1.0), (0.4, 0.1), False, False),
    "lower-is-better": (False, 0.0, (9.0, 1.0), (8.0, 1.0), True, True),
    "equal-and-surer": (True, 0.0, (0.5, 1.0), (0.5, 0.9), True, False),
    "too-little": (True, 0.05, (0.5, 1.0), (0.54, 1.0), True, False),
    "enough": (True, 0.05, (0.5, 1.0), (0.56, 1.0), True, True),
    "too-little-downwards": (False, 0.5, (9.0, 1.0), (8.6, 1.0), True, False),
}


@pytest.mark.parametrize("case", JUDGED)
def test_the_best_and_the_patience_are_judged_by_the_metric(case):
    higher, delta, best, new, better, gain = JUDGED[case]
    history = History(done=4, best=Scores(best[1], best[0], step=2), worse=1)
    patience, metric = EarlyStopping(patience=3, min_delta=delta), Metric("m", "m", higher, False)
    assert evaluator.verdict(history, Scores(new[1], new[0]), metric, patience) == (better, 0 if gain else 2)
