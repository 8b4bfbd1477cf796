"""Which samples come when, and the seeds of a step: functions of recipe, epoch and step, on any number of processes."""

import json
import os

import numpy as np
import pytest

from leansurgeon.training import data_loader, distributed, schedule
from leansurgeon.training.recipe.schema import Train
from tests.support import training_interrupted as cut
from tests.support.training_standin import run_training, word_model


@pytest.mark.parametrize("ramp", [None, {"start": 16, "until": 0.5}, {"start": 8, "until": "1ep"}])
def test_every_epoch_shows_every_sample_once_whatever_the_ramp(ramp):
    settings = {"duration": "3ep", "batch": 32, "batch_ramp": ramp, "micro_batch": 2, "optim": {"lr": 1e-3}}
    made = schedule.make_plan(Train.model_validate(settings), 100, 1)
    seen, batches = [], []
    for step in range(made.steps):
        before = len(seen)
        parts = data_loader.list_groups(
            lambda epoch: data_loader.epoch_order(7, epoch, 100),
            made.position(step), made.batch_at(step), 100, made.group,
        )  # fmt: skip
        seen += [(epoch, index) for epoch, indices in parts for index in indices]
        batches.append(len(seen) - before)
    assert len(set(seen)) == len(seen) == made.position(made.steps) and made.epochs >= 3
    assert batches == sorted(batches) == [made.batch_at(step) for step in range(made.steps)]
    assert (batches[0], batches[-1]) == (ramp["start"] if ramp else 32, 32)
    assert made.epochs < 3 + 32 / made.epoch_samples


def test_texts_of_like_length_stand_in_one_batch():
    lengths = np.random.default_rng(0).integers(4, 128, 1000)
    order = data_loader.epoch_order(0, 1, 1000)
    grouped = data_loader.order_by_length(order, lengths, 0, 1, 16)
    assert sorted(grouped) == list(range(1000)) and np.array_equal(grouped[992:], order[992:])
    before, after = (lengths[rows[:992]].reshape(-1, 16) for rows in (order, grouped))
    assert before.max(1).sum() * 16 > 1.8 * before.sum() and after.max(1).sum() * 16 < 1.05 * after.sum()
    assert abs(np.corrcoef(np.arange(62), after[:, 0])[0, 1]) < 0.3  # short and long batches come mixed
    assert not np.array_equal(grouped, data_loader.order_by_length(order, lengths, 1, 1, 16))


def test_order_and_seeds_are_those_of_earlier_versions():
    """PCG64 and its permutation are specified by numpy, SplitMix64 by its authors: every machine has the same."""
    fresh = np.random.Generator(np.random.PCG64(np.random.SeedSequence([1, 5, 2]))).permutation(100)
    assert np.array_equal(data_loader.epoch_order(5, 2, 100), fresh)
    assert data_loader.dropout_seed(7, 11, 3) == 13299565375620249167
    assert data_loader.mixing_seed(5, 2, 9) == 2043258626
    every = {data_loader.dropout_seed(0, step, rank) for step in range(50) for rank in range(8)}
    assert len(every) == 50 * 8


def _note_seeds(folder) -> None:
    seeds, real = [], distributed.seed_generators
    distributed.seed_generators = lambda device, seed: (seeds.append(seed), real(device, seed))
    run_training(folder, loaded=word_model(dropout=0.5), duration="4st")
    (folder / f"seeds-{os.environ['RANK']}").write_text(json.dumps(seeds))


def test_each_process_and_step_drops_by_a_seed_of_its_own(tmp_path):
    """What the first one drops is what it would drop alone."""
    assert cut.processes(2, _note_seeds, tmp_path) == [0, 0]
    for rank in (0, 1):
        found = json.loads((tmp_path / f"seeds-{rank}").read_text())
        assert found == [data_loader.dropout_seed(0, step, rank) for step in range(4)]


def test_batches_made_ahead_are_the_same_and_errors_come_through():
    assert list(data_loader.prefetch(iter(range(50)), depth=2)) == list(range(50))

    def broken():
        yield 1
        raise ValueError("no more")

    items = data_loader.prefetch(broken(), depth=2)
    assert next(items) == 1
    with pytest.raises(ValueError, match="no more"):
        next(items)
    early = data_loader.prefetch(iter(range(10**9)), depth=2)
    assert next(early) == 0
    early.close()  # ends its thread
