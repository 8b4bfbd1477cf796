"""How certain a mean or a difference is: paired over samples, by Welch over seeds, and by the size of a test set."""

from __future__ import annotations

from collections.abc import Sequence
from math import atan, cos, erfc, inf, pi, sin, sqrt
from statistics import NormalDist

LEVEL = 0.95
NEEDED = 2.0  # standard errors, or more where few seeds make the standard error itself uncertain
TAIL = 0.025  # the share of a distribution beyond each quantile
MANY = 60  # degrees of freedom that are as good as all


def paired_interval(differences: Sequence[float], counts: Sequence[float] | None = None) -> tuple[float, float] | None:
    """Where the mean difference of two models on the same samples lies with 95 %: Student's t over samples, each of
    which adds its `differences[i]` over `counts[i]` labels (None: one each). None for fewer than two samples.

    The mean over labels is a ratio of two sums, and its variance that of the ratio made linear; where all samples
    count the same, this is the interval of the paired t test.
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
    """p (1 - p) / N of a share of samples; moved by half a sample, so that 100 % of few is not certain."""
    p = (min(max(share, 0.0), 1.0) * samples + 0.5) / (samples + 1)
    return p * (1 - p) / samples


def degrees_of_freedom(error: float, estimated: Sequence[tuple[float, int]]) -> float:
    """Welch and Satterthwaite's degrees of freedom of a standard error, of which these parts (a standard error of the
    mean of so many seeds) are estimated and the rest is known; infinite where nothing is estimated.
    """
    spread = sum(part**4 / (n - 1) for part, n in estimated if n > 1)
    return error**4 / spread if spread else inf


def errors_needed(freedom: float, comparisons: int = 1) -> float:
    """Standard errors from which on a difference counts: Student's two-sided 95 %, that of so many comparisons
    together, and never below two.
    """
    wanted = 1 - 2 * TAIL / comparisons
    if freedom >= MANY:
        return max(NEEDED, NormalDist().inv_cdf((1 + wanted) / 2))
    low, high = 0.0, 1e9
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if share_within(middle, count_down(freedom)) < wanted else (low, middle)
    return max(NEEDED, high)


def p_value(ratio: float, freedom: float) -> float:
    """How often chance alone gives a distance of so many standard errors, in either direction."""
    return erfc(ratio / sqrt(2)) if freedom >= MANY else 1 - share_within(ratio, count_down(freedom))


def share_within(x: float, freedom: int) -> float:
    """The share of Student's t between -x and x (Abramowitz and Stegun, 26.7.3 and 26.7.4), without scipy: a report is
    printed at once.
    """
    angle, odd = atan(x / sqrt(freedom)), freedom % 2
    term, total = cos(angle) if odd else 1.0, 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= cos(angle) ** 2 * k / (k + 1)
    return 2 / pi * (angle + sin(angle) * total) if odd else sin(angle) * total


def count_down(freedom: float) -> int:
    """Degrees of freedom as a whole number: 3.9999999 are 4."""
    return max(1, int(freedom + 1e-9))
