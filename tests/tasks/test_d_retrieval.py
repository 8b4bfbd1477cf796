"""Generalised D-retrieval: the data follows its formula, and as many heads as things to retrieve are enough."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from sklearn.metrics import r2_score

from leansurgeon import tasks
from tests.tasks.prepared import everything, prepare

prepared = partial(prepare, name="d-retrieval")


@pytest.mark.parametrize(("dimension", "size"), [(3, None), (5, 3)])
def test_labels_follow_the_formula(tmp_path, dimension, size):
    task = prepared(tmp_path, dimension=dimension, input_size=size, length=7, train=300, eval=200)
    a = np.load(task._folder / "directions.npy")
    assert np.allclose(np.linalg.norm(a, axis=1), 1)
    if size is None:
        assert np.allclose(a @ a.T, np.eye(dimension), atol=1e-12)
    train, evaluation = (everything(task, s) for s in ("train", "eval"))
    values = np.concatenate([train["input_values"].numpy(), evaluation["input_values"].numpy()])
    assert values.shape == (500, 7, 3) and values.dtype == np.float32
    target = sum((values @ row).max(axis=1) for row in a)
    target = (target - target[:300].mean()) / target[:300].std()
    assert np.allclose(torch.cat([train["labels"], evaluation["labels"]]).numpy(), target, atol=1e-4)


def test_nmse_is_one_minus_the_explained_variance(tmp_path):
    task = prepared(tmp_path, dimension=2, train=50, eval=40)
    batch = task.batch("eval", np.arange(40), seed=0, epoch=0)
    guess = torch.randn(40, 1)
    score = task.score(guess, {"labels": batch["labels"]})
    expected = 1 - r2_score(batch["labels"].numpy(), guess[:, 0].numpy())
    assert task.metric_value(tasks.Sums(*map(float, score[:4]))) == {"nmse": pytest.approx(expected, rel=1e-5)}
