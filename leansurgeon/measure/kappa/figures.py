"""Aggregate the conditioning of single blocks to figures of a layer and of a model, as plain values for JSON.

No torch: reports import the meaning of the figures from here. JSON has no infinity, so a block without full rank
becomes null with a lower bound beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, median_low, stdev

from leansurgeon.reading.jsonfile import JsonObject

RESAMPLES = 1_000


@dataclass(frozen=True)
class Conditioning:
    """Statistics of one block (one sample, one layer).

    `kappa` is infinite if the numerical rank is below k = min(tokens, inner); the true value is then at least `bound`.
    The same holds for `centred` and `centred_bound` (the mean token subtracted; NaN with a single token).
    """

    kappa: float
    bound: float
    rank: int
    k: int
    centred: float
    centred_bound: float
    stable_rank: float
    effective_rank: float
    aspect: float
    tokens: int


def summarise(samples: Sequence[Conditioning], layer: int) -> JsonObject:
    """Return one layer's statistics over samples. `median_interval` is the 95 % interval of the median (`interval`)."""
    whole = [c.kappa for c in samples if math.isfinite(c.kappa)]
    logs = [math.log(value) for value in whole]
    centred, centred_bound = median_or_bound([c.centred for c in samples], [c.centred_bound for c in samples])
    return (
        {"layer": layer}
        | over_samples(samples)
        | {
            "mean": fmean(whole) if whole else None,
            "geometric_mean": math.exp(fmean(logs)) if logs else None,
            "log_sd": stdev(logs) if len(logs) > 1 else None,
            "centred_median": centred,
            "centred_lower_bound": centred_bound,
            "stable_rank": median(c.stable_rank for c in samples),
            "effective_rank": median(c.effective_rank for c in samples),
            "aspect": median(c.aspect for c in samples),
        }
    )


def over_samples(samples: Sequence[Conditioning]) -> JsonObject:
    """Return median with its interval, worst value and rank: the statistics that do not depend on centering."""
    kappas, bounds = [c.kappa for c in samples], [c.bound for c in samples]
    middle, middle_bound = median_or_bound(kappas, bounds)
    deficient = sum(not math.isfinite(value) for value in kappas)
    # The sample that lacks most rank; if none lacks any, a typical one.
    missing = max(c.k - c.rank for c in samples)
    typical = median_low([c.k for c in samples])
    shown = next(c for c in samples if (c.k - c.rank == missing if missing else c.k == typical))
    return {
        "median": middle,
        "median_lower_bound": middle_bound,
        "median_interval": interval(kappas),
        "worst": None if deficient else max(kappas),
        "lower_bound": max(bounds) if deficient else None,
        "rank": shown.rank,
        "k": shown.k,
        "deficient": deficient,
    }


def interval(values: Sequence[float]) -> list[float | None] | None:
    """Return the 95 % interval of the median over samples, by the bootstrap (1,000 resamples, always the same ones, so
    that equal samples of two models are resampled alike). An infinite end is null; None with fewer than two samples.

    >>> interval([3.0] * 8)
    [3.0, 3.0]
    """
    import numpy as np  # here, so that reports start without it

    if len(values) < 2:
        return None
    drawn = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    medians = np.sort(np.median(np.array(values)[drawn], axis=1))
    ends = medians[round(0.025 * RESAMPLES)], medians[round(0.975 * RESAMPLES) - 1]
    return [float(end) if math.isfinite(end) else None for end in ends]


def median_or_bound(values: Sequence[float], bounds: Sequence[float]) -> tuple[float | None, float | None]:
    """Return (median, None), or (None, median of the lower bounds) if the median is infinite; NaNs are excluded."""
    known = [(v, b) for v, b in zip(values, bounds, strict=True) if not math.isnan(v)]
    if not known:
        return None, None
    middle = median(v for v, _ in known)
    return (middle, None) if math.isfinite(middle) else (None, median(b for _, b in known))


def over_layers(layers: Sequence[JsonObject]) -> JsonObject:
    """Return the model's figures from its layers'.

    Compare models of different depth by layer instead: kappa grows with depth.
    """

    def of(key: str) -> list[float]:
        return [layer[key] for layer in layers if layer[key] is not None]

    means, medians, centred = of("mean"), of("median"), of("centred_median")
    whole, unknown = len(medians) == len(layers), of("median_lower_bound")
    return {
        "mean": fmean(means) if len(means) == len(layers) else None,
        "median": median(medians) if whole else None,
        "worst": max(medians) if whole else None,
        "lower_bound": max(medians + unknown) if unknown else None,
        "median_lower_bound": median(medians + unknown) if unknown else None,
        "centred_median": median(centred) if len(centred) == len(layers) else None,
        "deficient": sum(layer["deficient"] for layer in layers),
    }
