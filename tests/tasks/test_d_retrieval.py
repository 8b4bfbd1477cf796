"""Generalised D-retrieval: the data follows its formula, and as many heads as things to retrieve are enough."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from leansurgeon import tasks
from leansurgeon.models.d_retrieval import DRetrievalConfig, DRetrievalForSequenceClassification
from leansurgeon.tasks.long_range import d_retrieval


def prepared(cache, **options):
    task = tasks.make("d-retrieval", options)
    task.prepare(cache, None, workers=1, say=lambda line: None)
    return pickle.loads(pickle.dumps(task))


@pytest.mark.parametrize(("dimension", "size"), [(3, None), (2, 5), (5, 3)])
def test_labels_follow_the_formula(tmp_path, dimension, size):
    task = prepared(tmp_path, dimension=dimension, input_size=size, length=7, train=300, eval=200)
    a = np.load(task._folder / "directions.npy")
    assert np.allclose(np.linalg.norm(a, axis=1), 1)
    if dimension <= (size or dimension):
        assert np.allclose(a @ a.T, np.eye(dimension), atol=1e-12)
    train, evaluation = (task.batch(s, np.arange(task.size(s)), seed=0, epoch=0) for s in ("train", "eval"))
    values = np.concatenate([train["input_values"].numpy(), evaluation["input_values"].numpy()])
    assert values.shape == (500, 7, size or dimension) and values.dtype == np.float32
    target = sum((values @ row).max(axis=1) for row in a)
    target = (target - target[:300].mean()) / target[:300].std()
    assert np.allclose(torch.cat([train["labels"], evaluation["labels"]]).numpy(), target, atol=1e-4)


def test_nmse_is_one_minus_the_explained_variance(tmp_path):
    from sklearn.metrics import r2_score

    task = prepared(tmp_path, dimension=2, train=50, eval=40)
    batch = task.batch("eval", np.arange(40), seed=0, epoch=0)
    guess = torch.randn(40, 1)
    scores = [task.score(guess[rows], {"labels": batch["labels"][rows]}) for rows in (slice(0, 15), slice(15, 40))]
    sums = tasks.Sums(*(float(a + b) for a, b in zip(scores[0][:4], scores[1][:4], strict=True)))
    expected = 1 - r2_score(batch["labels"].numpy(), guess[:, 0].numpy())
    assert task.metric_value(sums) == {"nmse": pytest.approx(expected, rel=1e-5)}


def test_directions_differ_by_seed(tmp_path):
    first, second = (prepared(tmp_path, seed=seed, train=4, eval=4) for seed in (0, 1))
    assert not np.allclose(np.load(first._folder / "directions.npy"), np.load(second._folder / "directions.npy"))
    one = d_retrieval.directions(4, 4, np.random.default_rng(0))
    assert np.array_equal(one, d_retrieval.directions(4, 4, np.random.default_rng(0)))


def test_the_model_reads_tokens_in_any_order_and_its_layers_stack():
    torch.manual_seed(0)
    for layers in (1, 3):
        model = DRetrievalForSequenceClassification(DRetrievalConfig(num_hidden_layers=layers, num_attention_heads=3))
        values = torch.randn(2, 9, 4)
        with torch.no_grad():
            assert torch.allclose(model(values).logits, model(values[:, torch.randperm(9)]).logits, atol=1e-6)
        model(values, labels=torch.randn(2)).loss.backward()
        still = [n for n, p in model.named_parameters() if p.grad is None]
        # Softmax does not move when every key does: a key's bias has a gradient of zero, but it has one.
        assert not still
        assert model.model.layers[0].attention.query.weight.shape == (24, 32)


def test_two_heads_do_what_one_cannot(tmp_path):
    """D = 2: the error falls by more than five times with the second head (the prototype: 0.137 to 0.004)."""
    task = prepared(tmp_path, dimension=2, length=8)
    found = {}
    for heads in (1, 2):
        torch.manual_seed(0)
        model = DRetrievalForSequenceClassification(DRetrievalConfig(input_size=2, num_attention_heads=heads))
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, 600, pct_start=0.1)
        rng = np.random.default_rng(0)
        for _ in range(600):
            batch = task.batch("train", rng.integers(0, 8000, 128), seed=0, epoch=0)
            score = task.score(model(batch["input_values"]).logits, batch)
            (score.loss_sum / score.loss_count).backward()
            optimizer.step(), schedule.step(), optimizer.zero_grad()
        batch = task.batch("eval", np.arange(2000), seed=0, epoch=0)
        with torch.no_grad():
            score = task.score(model(batch["input_values"]).logits, batch)
        found[heads] = task.metric_value(tasks.Sums(*map(float, score[:4])))["nmse"]
    assert found[1] > 0.02 and found[1] > 5 * found[2], found
