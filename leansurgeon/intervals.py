"""Confidence of a mean or a difference: paired over samples, by Welch over seeds, and by the size of a test set."""

from __future__ import annotations

from collections.abc import Sequence
from math import atan, cos, erfc, inf, pi, sin, sqrt
from statistics import NormalDist

LEVEL = 0.95
NEEDED = 2.0  # standard errors, or more if few seeds make the standard error itself uncertain
TAIL = 0.025  # the share of a distribution beyond each quantile
MANY = 60  # degrees of freedom from which the normal distribution serves


def paired_interval(differences: Sequence[float], counts: Sequence[float] | None = None) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the mean difference of two models on the same samples, by Student's t.

    Sample i adds `differences[i]` over `counts[i]` labels (None: one each). None for fewer than two samples. The mean
    over labels is a ratio of two sums, and its variance that of the linearized ratio; if all samples count the same,
    this is the interval of the paired t test.
    """
    from scipy.special import stdtrit

    n = len(differences)
    weights = [1.0] * n if counts is None else counts
    total = sum(weights)
    if n < 2 or not total:
        return None
    mean = sum(differences) / total
    rest = sum((d - mean * c) ** 2 for d, c in zip(differences, weights, strict=True))
    half = float(stdtrit(n - 1, (1 + LEVEL) / 2)) * sqrt(n / (n - 1) * rest) / total
    return mean - half, mean + half


def binomial_variance(share: float, samples: int) -> float:
    """Return p (1 - p) / N for a share of samples, shifted by half a sample so that 100 % of few samples is not
    certain.
    """
    p = (min(max(share, 0.0), 1.0) * samples + 0.5) / (samples + 1)
    return p * (1 - p) / samples


def degrees_of_freedom(error: float, estimated: Sequence[tuple[float, int]]) -> float:
    """Return the Welch-Satterthwaite degrees of freedom of a standard error; infinite if nothing is estimated.

    `estimated` lists its parts that are estimated, each a standard error of the mean and a number of seeds; the rest is
    known.
    """
    spread = sum(part**4 / (n - 1) for part, n in estimated if n > 1)
    return error**4 / spread if spread else inf


def errors_needed(freedom: float, comparisons: int = 1) -> float:
    """Return how many standard errors make a difference significant: Student's two-sided 95 %, for `comparisons`
    comparisons together, and never below two.
    """
    wanted = 1 - 2 * TAIL / comparisons
    if freedom >= MANY:
        return max(NEEDED, NormalDist().inv_cdf((1 + wanted) / 2))
    low, high = 0.0, 1e9
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if share_within(middle, freedom) < wanted else (low, middle)
    return max(NEEDED, high)


def p_value(ratio: float, freedom: float) -> float:
    """Return the probability of a difference of `ratio` standard errors by chance, in either direction."""
    return erfc(ratio / sqrt(2)) if freedom >= MANY else 1 - share_within(ratio, freedom)


def share_within(x: float, freedom: float) -> float:
    """Return the share of Student's t between -x and x (Abramowitz and Stegun, 26.7.3 and 26.7.4), without scipy, which
    takes long to import for a report.
    """
    whole = max(1, int(freedom + 1e-9))  # 3.9999999 are 4
    angle, odd = atan(x / sqrt(whole)), whole % 2
    term, total = cos(angle) if odd else 1.0, 0.0
    for k in range(1 + odd, whole, 2):
        total += term
        term *= cos(angle) ** 2 * k / (k + 1)
    return 2 / pi * (angle + sin(angle) * total) if odd else sin(angle) * total
