"""Importance, rules of pruning and the document of `leansurgeon heads`: numbers worked out beside them."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from leansurgeon.checkpoints.model import Loaded
from leansurgeon.errors import Diverged, LeanSurgeonError
from leansurgeon.measure.data.batches import thin
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.measure.heads import pruning
from leansurgeon.measure.heads.document import HeadOptions, study
from leansurgeon.measure.heads.importance import importance
from leansurgeon.measure.heads.judge import HeadScorer, Labelled, OutputScorer, Scores
from leansurgeon.measure.heads.sites import sites
from tests.support.models.small_classifier import Rule, classifier


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    """A random BERT of 2 layers and 4 heads each, in training mode and with dropout."""
    return classifier(
        vocab_size=20, num_attention_heads=4, num_labels=3, initializer_range=0.3, hidden_dropout_prob=0.5
    )


def batch_of(size: int, seed: int = 0) -> dict:
    draws = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 20, (size, 9), generator=draws)
    lengths = torch.randint(3, 10, (size, 1), generator=draws)
    labels = torch.randint(0, 3, (size,), generator=draws)
    return {"input_ids": ids, "attention_mask": (torch.arange(9) < lengths).long(), "labels": labels}


def parts(batch: dict, *sizes: int) -> list[dict]:
    """The same samples in batches of other sizes."""
    return [dict(zip(batch, rows, strict=True)) for rows in zip(*(v.split(sizes) for v in batch.values()), strict=True)]


def test_importance_is_the_mean_over_samples_whatever_the_batches_and_without_dropout(loaded):
    judge, places, whole = Labelled(loaded, Rule()), sites(loaded), batch_of(12)
    assert loaded.model.training
    values = importance(judge, places, [whole])
    assert importance(judge, places, parts(whole, 5, 4, 3)) == pytest.approx(values, rel=1e-4)
    one_by_one = [importance(judge, places, [one]) for one in parts(whole, *[1] * 12)]
    assert np.mean(one_by_one, 0) == pytest.approx(values, rel=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert importance(judge, places, [whole]) == pytest.approx(values, rel=1e-6)


def test_what_is_no_number_or_did_not_run_is_refused(loaded):
    broken = replace(loaded, model=copy.deepcopy(loaded.model))
    broken.model.classifier.weight.data.fill_(torch.nan)
    judge, places = Labelled(broken, Rule()), sites(broken)
    with pytest.raises(Diverged, match=r"\bloss\b.*\bNaN\b"):
        _ = HeadScorer(judge, places, [batch_of(4)]).whole
    with pytest.raises(Diverged, match=r"\bgradient\b.*\bNaN\b"):
        importance(judge, places, [batch_of(4)])
    broken.model.add_module("idle", torch.nn.Linear(2, 2))
    with pytest.raises(LeanSurgeonError, match=r"'idle'"):
        importance(judge, [*places, replace(places[0], module="idle")], [batch_of(4)])


# -- rules of pruning -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("whole", "judge", "enough", "too_much"),
    [
        (Scores(np.array([4.0]), np.array([1, 0])), Labelled(None, None), {"accuracy": 0.495}, {"accuracy": 0.494}),
        (Scores(np.array([4.0]), None), Labelled(None, None), {"loss": 4.04}, {"loss": 4.05}),
        (Scores(np.array([0.0]), None), OutputScorer(None), {"loss": 0.01}, {"loss": 0.011}),
    ],
    ids=["accuracy", "loss", "cosine"],
)
def test_a_hundredth_may_be_lost(whole, judge, enough, too_much):
    losses = (enough, enough, too_much, enough)  # what goes ends at the first loss
    rows = [{"fraction": i / 4} | one for i, one in enumerate(losses)]
    assert pruning.prunable(rows, SimpleNamespace(whole=whole, judge=judge)) == 0.25


# -- documents ------------------------------------------------------------------------------------


def test_what_a_training_is_told(loaded):
    """Importance of training batches, scores of evaluation batches, least important heads first."""
    fit, judged, state = batch_of(16, 1), batch_of(24, 2), torch.get_rng_state()
    found = pruning.at_epoch(loaded, Rule(), [fit], [judged], steps=4)
    assert loaded.model.training and torch.equal(state, torch.get_rng_state())
    judge, places = Labelled(loaded, Rule()), sites(loaded)
    values = importance(judge, places, [fit])
    assert np.concatenate(found["importance"]["share"]) == pytest.approx(values / values.sum())
    order, bench = np.argsort(values), HeadScorer(judge, places, [judged])
    expected = [bench.scores(~np.isin(np.arange(8), order[:gone])).loss for gone in (0, 2, 4, 6, 8)]
    assert [row["loss"] for row in found["curve"]] == pytest.approx(expected)
    gini = np.abs(values[:, None] - values).mean() / (2 * values.mean())  # that of the books
    assert found["importance"]["gini"] == pytest.approx(gini, rel=1e-6)


def test_options_of_a_study_reach_what_they_name(loaded):
    data = Calibration("noise", "noise", "0" * 64, [batch_of(16, 1)], [], [batch_of(30, 2)], task=Rule())

    def of(data: Calibration, **options) -> dict:
        return study(loaded, data, HeadOptions(curve=False, **options)).document

    ablated = of(data, ablate=True, judge_samples=20)
    assert ablated["samples"] == {"importance": 16, "ablation": 20, "curve": 20}
    off = np.array([[head["change"] for head in entry["off"]] for entry in ablated["attentions"]])
    assert len(set(off.ravel())) == 8  # every head has its own
    assert ablated["ablation"]["lower_without"] == (off < 0).sum()
    assert ablated["kinds"] == {"self": {"heads": 8, "share": pytest.approx(1.0)}} and not ablated["text"]
    others = batch_of(16, 1)
    others["labels"] += 7  # classes that the model does not know
    unlabelled = Calibration("noise", "noise", "0" * 64, [others], [], data.heldout)
    documents = [of(unlabelled, seed=seed) for seed in (0, 1)]
    values = [[entry["importance"] for entry in document["attentions"]] for document in documents]
    assert not np.allclose(*values) and np.allclose(*values, rtol=2)


def test_every_batch_and_seed_has_its_own_directions():
    output = torch.nn.functional.normalize(torch.randn(4, 64, generator=torch.Generator().manual_seed(0)), dim=-1)
    found = [OutputScorer(None, seed).slopes(output, {}, number).tolist() for seed in (0, 1) for number in (0, 1)]
    assert len({tuple(slopes) for slopes in found}) == 4
    assert found[3] == OutputScorer(None, 1).slopes(output, {}, 1).tolist()


def test_few_samples_are_spread_from_the_first_to_the_last():
    batches = [{"labels": rows} for rows in torch.arange(9).split([2, 4, 3])]
    assert torch.cat([batch["labels"] for batch in thin(batches, 4)]).tolist() == [0, 3, 5, 8]  # 0, 2.7, 5.3, 8


def test_the_nearest_number_of_heads_goes(loaded):
    bench = HeadScorer(Labelled(loaded, Rule()), sites(loaded), [batch_of(4)])
    assert [row["pruned"] for row in pruning.curve(bench, np.arange(8), [0.2, 0.3])] == [2, 2]  # 1.6 and 2.4 heads
