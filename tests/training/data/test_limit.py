"""Tasks that stand for another one travel to worker processes that are spawned."""

from __future__ import annotations

import multiprocessing
import pickle

import numpy as np
import pytest
import torch

from leansurgeon.training import data_loader
from leansurgeon.training.data_loader import FirstSamples, SpreadSamples
from leansurgeon.training.preview import Synthetic
from tests.support.training_standin import Words

STANDING = {
    "limited": lambda: FirstSamples(Words(), 32, 8),
    "sampled": lambda: SpreadSamples(Words(), 5),
    "both": lambda: FirstSamples(SpreadSamples(Words(), 5), 32, 3),
    "synthetic": lambda: Synthetic(Words()),
}


@pytest.mark.parametrize("kind", STANDING)
def test_a_pickle_gives_the_same_task(kind):
    task = STANDING[kind]()
    again = pickle.loads(pickle.dumps(task))
    assert (again.size("train"), again.size("eval"), again.name) == (task.size("train"), task.size("eval"), "words")
    with pytest.raises(AttributeError):
        _ = again.nothing_of_the_kind
    if kind != "synthetic":
        rows = {"seed": 0, "epoch": 0}
        one, other = (each.batch("eval", np.arange(3), **rows) for each in (task, again))
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow
def test_workers_that_are_spawned_make_the_same_batches(monkeypatch):
    monkeypatch.setattr(data_loader, "_START", multiprocessing.get_context("spawn"))
    rows = [(0, np.arange(at, at + 4)) for at in range(0, 16, 4)]
    found = list(data_loader.make_batches(FirstSamples(Words(), 32, 8), "train", rows, seed=0, workers=1))
    wanted = list(data_loader.make_batches(Words(), "train", rows, seed=0))
    assert all(torch.equal(a[key], b[key]) for a, b in zip(found, wanted, strict=True) for key in a)
