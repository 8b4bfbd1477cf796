"""Ablation, statistics and pruning curves, on a small model trained for a rule that needs few of its heads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import functional as F

from leansurgeon.checkpoints.model import Loaded
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.measure.heads import pruning
from leansurgeon.measure.heads.document import HeadOptions, study
from leansurgeon.measure.heads.importance import importance
from leansurgeon.measure.heads.judge import HeadScorer, Labelled, OutputScorer
from leansurgeon.measure.heads.sites import sites
from tests.support.models.small_classifier import Rule, classifier


def batch_of(size: int, seed: int) -> dict:
    """The class is the token at place 3: only attention can bring it to the first one, where the classifier reads."""
    ids = torch.randint(2, 10, (size, 8), generator=torch.Generator().manual_seed(seed))
    ids[:, 0] = 0
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 3] - 2}


@pytest.fixture(scope="module")
def trained() -> Loaded:
    """A BERT of 2 layers and 8 heads each, trained until it knows the rule: how many steps that takes depends on how
    the processor rounds (120 were enough on one kind of machine and gave 52 % on another)."""
    loaded = classifier(
        vocab_size=10, num_attention_heads=8, num_labels=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    model = loaded.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(1500):
        batch = batch_of(64, 100 + step)
        labels = batch.pop("labels")
        loss = F.cross_entropy(model(**batch).logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss < 0.01:
            break
    model.eval()
    return loaded


@pytest.fixture(scope="module")
def bench(trained) -> HeadScorer:
    return HeadScorer(Labelled(trained, Rule()), sites(trained), [batch_of(128, 1), batch_of(72, 2)])


@pytest.fixture(scope="module")
def values(trained, bench) -> np.ndarray:
    return importance(bench.judge, bench.sites, [batch_of(128, 3), batch_of(128, 4)])


def test_importance_finds_the_heads_that_are_needed(bench, values):
    assert bench.whole.accuracy > 0.95
    order = np.argsort(values, kind="stable")
    found, reverse = (pruning.curve(bench, ranked, pruning.fractions(8)) for ranked in (order, order[::-1]))
    assert np.mean([row["loss"] for row in found]) < np.mean([row["loss"] for row in reverse])
    for rows in (found, reverse):  # both ends are the same whatever the order
        assert rows[0]["loss"] == pytest.approx(bench.whole.loss, rel=1e-12)
        assert rows[-1]["loss"] == found[-1]["loss"] and rows[-1]["pruned"] == 16
    assert pruning.prunable(found, bench) >= 0.25 > pruning.prunable(reverse, bench)


def without_head(trained: Loaded, bench: HeadScorer, head: int) -> tuple[np.ndarray, np.ndarray]:
    """Losses of all samples, and which are right, where a head's part of the output projection is zero."""
    weight = trained.model.get_submodule(bench.sites[head // 8].module).weight
    h, kept = head % 8, weight.detach().clone()
    labels = torch.cat([batch["labels"] for batch in bench.batches])
    with torch.no_grad():
        weight[:, 4 * h : 4 * h + 4] = 0
        logits = torch.cat([trained.forward(batch) for batch in bench.batches])
        weight.copy_(kept)
    losses = F.cross_entropy(logits, labels, reduction="none")
    return losses.double().numpy(), (logits.argmax(-1) == labels).numpy()


def test_one_head_off_is_the_loss_without_it_and_ranks_like_importance(trained, bench, values):
    off = pruning.one_off(bench)
    deltas = np.array([row["change"] for row in off])
    assert pruning.spearman(values, deltas) > 0.6
    worst = int(np.argmax(deltas))
    assert pruning.matters(off[worst])
    for head in {worst, 0}:
        losses, right = without_head(trained, bench, head)
        differences = losses - bench.whole.losses
        assert off[head]["accuracy_change"] == pytest.approx(right.mean() - bench.whole.accuracy, abs=1e-12)
        assert off[head]["change"] == pytest.approx(differences.mean(), rel=1e-5, abs=1e-9)
        assert off[head]["standard_error"] == pytest.approx(stats.sem(differences), rel=1e-4)
        assert off[head]["p"] == pytest.approx(stats.ttest_rel(losses, bench.whole.losses).pvalue, rel=1e-3)


def test_holm_is_that_of_the_book():
    """Against the definition: the largest of (m - j + 1) p_j over all j up to i, at most 1."""
    p = np.array([0.01, 0.04, 0.03, 0.005, 0.9])
    assert pruning.holm(p) == pytest.approx([0.04, 0.09, 0.09, 0.025, 0.9])
    assert pruning.holm(np.array([0.7, 0.6])) == pytest.approx([1.0, 1.0])


def test_nothing_is_tested_where_nothing_differs_or_nothing_can_be_told(trained):
    assert pruning.paired_p(np.zeros(5)) == 1.0 and pruning.paired_p(np.ones(1)) is None
    judge = OutputScorer(trained)
    rows = pruning.one_off(HeadScorer(judge, sites(trained), [batch_of(16, 1)]))
    assert all(row["p"] is None and row["p_holm"] is None for row in rows)
    assert all(row["change"] >= -1e-6 for row in rows) and max(row["change"] for row in rows) > 1e-3


def test_every_order_of_the_document_is_what_its_name_says(trained):
    """Ranked on training samples, scored on the held-out ones."""
    fit, held = batch_of(96, 5), batch_of(90, 6)
    data = Calibration("rule", "a rule", "0" * 64, [fit], [fit], [held], task=Rule())
    found = study(trained, data, HeadOptions(ablate=True, steps=4)).document
    judge, places = Labelled(trained, Rule()), sites(trained)
    values, bench = importance(judge, places, [fit]), HeadScorer(judge, places, [held])
    order = np.argsort(values)
    for name, ranked in {"importance": order, "reverse": order[::-1]}.items():
        expected = [bench.scores(~np.isin(np.arange(16), ranked[:gone])).loss for gone in (0, 4, 8, 12, 16)]
        assert [row["loss"] for row in found["curve"]["orders"][name]] == pytest.approx(expected), name

    off = [row for entry in found["attentions"] for row in entry["off"]]
    changes = [row["change"] for row in off]
    assert [row["p_holm"] for row in off] == pytest.approx(pruning.holm(np.array([row["p"] for row in off])))
    shown = [row["change"] for row in off if row["p_holm"] < 0.05]
    assert found["ablation"]["worse"] == sum(change > 0 for change in shown) > 0
    assert found["ablation"]["better"] == sum(change < 0 for change in shown)
    assert found["ablation"]["spearman"] == pytest.approx(stats.spearmanr(values, changes).statistic)
