"""From single samples to the figures of a layer and of a model, against numpy and scipy."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from leansurgeon.measure.kappa.figures import Conditioning, interval, over_layers, over_samples, summarise
from leansurgeon.measure.kappa.spectrum import conditioning


def sample(kappa: float, rank: int = 4, k: int = 4, bound: float = 1e7) -> Conditioning:
    """A sample whose centred kappa is half of it; an infinite one has a bound."""
    least = kappa if math.isfinite(kappa) else bound
    return Conditioning(kappa, least, rank, k, kappa / 2, least / 2, 1.0, 1.0, 1.0, 4)


def test_figures_of_layers_and_model_against_numpy() -> None:
    kappas = np.array([[1.0, 10.0, 1000.0, 20.0], [5.0, 7.0, 300.0, 6.0], [2.0, 3.0, 9.0, 4.0]])
    layers = [summarise([sample(x) for x in row], i) for i, row in enumerate(kappas, 1)]
    logs, medians = np.log(kappas), np.median(kappas, 1)
    for key, expected in (
        ("log_sd", logs.std(1, ddof=1)),
        ("geometric_mean", np.exp(logs.mean(1))),
        ("mean", kappas.mean(1)),
        ("centred_median", medians / 2),
    ):
        assert [layer[key] for layer in layers] == pytest.approx(list(expected)), key
    model = over_layers(layers)
    assert model["mean"] == pytest.approx(kappas.mean()) and model["worst"] == medians.max()
    assert model["median"] == np.median(medians) == 2 * model["centred_median"]


def test_medians_that_are_unknown_are_null_with_a_bound() -> None:
    lost = [sample(math.inf, 3, bound=bound) for bound in (1e7, 3e7)]
    layers = [summarise(lost, 1), summarise(conditioning(torch.eye(4)[None]), 2)]
    assert layers[0]["mean"] is layers[0]["median"] is layers[0]["worst"] is None
    assert (layers[0]["median_lower_bound"], layers[0]["lower_bound"]) == (2e7, 3e7)
    model = over_layers(layers)
    assert model["mean"] is model["median"] is model["worst"] is None
    assert model["lower_bound"] == 2e7 and model["deficient"] == 2
    json.dumps([layers, model], allow_nan=False)


def test_the_interval_of_the_median_has_its_exact_bootstrap_distribution() -> None:
    """Of an odd number n the resampled median is at most the k-th value where (n + 1) / 2 draws are, which is binomial:
    Binom(n, k / n). What 1,000 resamples give may be a rank off. Infinite samples make an open end.
    """
    from scipy import stats

    n = 61
    values = np.random.default_rng(1).lognormal(4, 0.8, size=n)
    below = stats.binom.sf((n - 1) // 2, n, np.arange(1, n + 1) / n)  # P(median <= k-th value)
    ranks = [int(np.searchsorted(below, p)) for p in (0.025, 0.975)]
    ordered, found = np.sort(values), interval(values.tolist())
    for end, rank in zip(found, ranks, strict=True):
        assert ordered[rank - 1] <= end <= ordered[rank + 1]
    assert interval([3.0] * 8) == [3.0, 3.0] and interval([3.0]) is None
    low, high = interval([*map(float, range(1, 33)), *[math.inf] * 28])
    assert 15 < low < 30 and high is None


def test_the_rank_that_is_shown_is_of_the_sample_that_lacks_most_or_of_a_typical_one():
    def shown(*ranks: tuple[int, int]) -> tuple[int, int]:
        found = over_samples([sample(2.0 if r == k else math.inf, r, k) for r, k in ranks])
        return found["rank"], found["k"]

    assert shown((9, 9), (5, 5), (6, 6)) == (6, 6)  # sentences of 9, 5 and 6 tokens
    assert shown((9, 9), (5, 7), (6, 7)) == (5, 7)


def test_a_model_whose_layers_are_partly_unknown_has_a_bound_over_all_of_them():
    known, lost = [sample(5.0)], [sample(math.inf, 3, bound=4e6)]
    found = over_layers([summarise(x, i) for i, x in enumerate((known, [sample(9.0)], lost), 1)])
    assert found["median"] is found["centred_median"] is None
    assert found["median_lower_bound"] == np.median([5.0, 9.0, 4e6]) and found["lower_bound"] == 4e6
    assert found["deficient"] == 1


def test_equal_samples_of_two_models_are_resampled_alike():
    for values in np.random.default_rng(0).lognormal(size=(10, 40)):
        low, high = interval(values.tolist())
        assert interval((8 * values).tolist()) == [8 * low, 8 * high]


def test_the_median_counts_samples_without_full_rank_as_infinite() -> None:
    found = summarise([sample(2.0), sample(math.inf, 3), sample(1.0), sample(math.inf, 3), sample(3.0)], 1)
    assert found["median"] == 3 and found["mean"] == 2
    assert (found["deficient"], found["worst"], found["lower_bound"]) == (2, None, 1e7)
