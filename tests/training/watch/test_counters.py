"""What is counted on the way goes on after an interruption, differs between steps, and is judged by the metric."""

from __future__ import annotations

import json
import os

import pytest
import torch

from leansurgeon.errors import Stopped
from leansurgeon.tasks import chance
from leansurgeon.tasks.base import Metric
from leansurgeon.training import data_loader, distributed, evaluator
from leansurgeon.training import loop as loop
from leansurgeon.training.optimizer import Trainer
from leansurgeon.training.recipe.schema import EarlyStopping
from leansurgeon.training.runs import checkpoint
from leansurgeon.training.runs.summary import Scores
from leansurgeon.training.state import History
from tests.support import training_interrupted as cut
from tests.support.training_standin import Words, recipe, word_model


def _interrupted(folder, batch: int, **settings) -> None:
    with pytest.raises(Stopped):
        cut.run(folder, cut.Interrupter("train", batch, cut.TERM), **settings)


GOES_ON = {
    "lamb": ({"optim": {"name": "lamb", "lr": 1e-2}}, 4 * 9),  # counts its steps for a whole group
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
def test_what_was_counted_goes_on(case, tmp_path):
    settings, batch = GOES_ON[case]
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = cut.run(tmp_path / "whole", **settings)
    _interrupted(tmp_path / "parts", batch, **settings)
    parts = cut.run(tmp_path / "parts", resume="auto", **settings)
    assert (whole["steps"], whole["stopped_early"]) == (parts["steps"], parts["stopped_early"])
    assert whole["stopped_early"] == (case == "patience")
    assert case != "patience" or whole["steps"] == 8  # the first is the best, three bring nothing
    assert cut.told(tmp_path / "whole") == cut.told(tmp_path / "parts")
    a, b = (cut.weights(tmp_path / name, "last") for name in ("whole", "parts"))
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_timed_training_goes_on_at_its_place_in_the_schedule(tmp_path, monkeypatch):
    settings = {"duration": "1h", "schedule": {"name": "triangle"}, "log_every": 3, "ema": None}
    _interrupted(tmp_path, 4 * 8, **settings)
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


def test_no_two_steps_or_processes_drop_the_same(tmp_path, monkeypatch):
    seeds = []
    monkeypatch.setattr(distributed, "seed_generators", lambda device, seed: seeds.append(seed))
    options = {"loaded": word_model(dropout=0.5), "task": Words(), "cpu": True, "say": lambda text: None}
    loop.train(recipe(), tmp_path, tmp_path / "run", **options)
    assert seeds == [data_loader.dropout_seed(0, step, 0) for step in range(8)]
    every = {data_loader.dropout_seed(seed, step, rank) for seed in range(3) for step in range(50) for rank in range(8)}
    assert len(every) == 3 * 50 * 8
    assert len({data_loader.mixing_seed(0, epoch, step) for epoch in range(3) for step in range(50)}) == 150


def test_the_seeds_of_a_step_are_those_of_earlier_versions():
    assert chance.mix_number(0) == 0xE220A8397B1DCDAF  # the first number of SplitMix64, as its authors print it
    assert data_loader.dropout_seed(7, 11, 3) == 13299565375620249167
    assert data_loader.mixing_seed(5, 2, 9) == 2043258626


def _note_seeds(folder) -> None:
    seeds, real = [], distributed.seed_generators
    distributed.seed_generators = lambda device, seed: (seeds.append(seed), real(device, seed))
    options = {"loaded": word_model(dropout=0.5), "task": Words(), "cpu": True, "say": lambda text: None}
    loop.train(recipe(), folder, folder / "run", **options)
    (folder / f"seeds-{os.environ.get('RANK', '0')}").write_text(json.dumps(seeds))


def test_how_many_processes_there_are_changes_no_dropout_of_the_first(tmp_path):
    """What a process drops is its own, and not that of the group."""
    seeds = []
    for count in (1, 2):
        folder = tmp_path / str(count)
        folder.mkdir()
        assert cut.processes(count, _note_seeds, folder) == [0] * count
        seeds += [json.loads((folder / f"seeds-{rank}").read_text()) for rank in range(count)]
    alone, first, second = seeds
    assert alone == first and len(alone) == 8 and not {*first} & {*second}


def _note_statistics(folder) -> None:
    real = evaluator.evaluate

    def evaluate(judged, *rest, **options):
        means = [b.clone() for name, b in judged.named_buffers() if name.endswith("running_mean")]
        torch.save(means, folder / f"means-{os.environ['RANK']}.pt")
        return real(judged, *rest, **options)

    evaluator.evaluate = evaluate
    cut.run(folder, duration="4st", ema=None)


def test_all_processes_evaluate_with_the_same_running_statistics(tmp_path):
    """Each has seen its own half of the samples: apart, they would evaluate two different models."""
    assert cut.processes(2, _note_statistics, tmp_path) == [0, 0]
    one, other = (torch.load(tmp_path / f"means-{rank}.pt", weights_only=True) for rank in (0, 1))
    assert len(one) == 1 and one[0].abs().max() > 0 and torch.equal(one[0], other[0])


# higher is better, min_delta, best (metric, loss), new (metric, loss): whether it is better, whether it is a gain
JUDGED = {
    "higher": (True, 0.0, (0.5, 1.0), (0.6, 2.0), True, True),
    "lower": (True, 0.0, (0.5, 1.0), (0.4, 0.1), False, False),
    "lower-is-better": (False, 0.0, (9.0, 1.0), (8.0, 1.0), True, True),
    "equal-and-surer": (True, 0.0, (0.5, 1.0), (0.5, 0.9), True, False),
    "equal-and-less-sure": (True, 0.0, (0.5, 1.0), (0.5, 1.1), False, False),
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
    assert history.worse == 1  # a verdict writes nothing
