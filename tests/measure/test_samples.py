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
    known = math.isfinite(kappa)
    return Conditioning(kappa, kappa if known else bound, rank, k, kappa, bound, 1.0, 1.0, 1.0, 4)


def test_figures_of_layers_and_model_against_numpy() -> None:
    def sample(kappa: float) -> Conditioning:
        return Conditioning(kappa, kappa, 4, 4, kappa / 2, kappa / 2, 1.0, 1.0, 1.0, 4)

    kappas = np.array([[1.0, 10.0, 1000.0, 20.0], [5.0, 7.0, 300.0, 6.0], [2.0, 3.0, 9.0, 4.0]])
    layers = [summarise([sample(x) for x in row], i) for i, row in enumerate(kappas, 1)]
    logs = np.log(kappas)
    assert [layer["log_sd"] for layer in layers] == pytest.approx(list(logs.std(1, ddof=1)))
    assert [layer["geometric_mean"] for layer in layers] == pytest.approx(list(np.exp(logs.mean(1))))
    assert [layer["mean"] for layer in layers] == pytest.approx(list(kappas.mean(1)))
    assert [layer["centred_median"] for layer in layers] == pytest.approx(list(np.median(kappas, 1) / 2))
    model, medians = over_layers(layers), np.median(kappas, 1)
    assert model["mean"] == pytest.approx(kappas.mean())
    assert (model["median"], model["worst"]) == (np.median(medians), medians.max())
    assert model["centred_median"] == np.median(medians) / 2


def test_medians_that_are_unknown_are_null_with_a_bound() -> None:
    def lost(bound: float) -> Conditioning:
        return Conditioning(math.inf, bound, 3, 4, math.inf, bound / 2, 1.0, 1.0, 1.0, 4)

    layers = [summarise([lost(1e7), lost(3e7)], 1), summarise(conditioning(torch.eye(4)[None]), 2)]
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
