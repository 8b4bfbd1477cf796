"""One head off: what single heads are worth, with a paired test for each and a correction for asking so often.

The test is Student's t on the differences of the samples' losses (masked minus whole, sample by sample), two-sided, and
Holm's step-down over all heads keeps the chance of a single false alarm below 5 % whatever the dependence between
heads. The paper tests at p < 0.01 without a correction: of 144 heads that do nothing, one or two would pass. With few
or heavy-tailed samples t is rough; the numbers of samples stand beside it.

A model that is judged by its distance from itself is never closer than 0, so there a test would always pass: none is
made.
"""

from __future__ import annotations

from typing import NotRequired, TypedDict

import numpy as np

from leansurgeon.measure.heads.judge import HeadScorer, Unlabelled
from leansurgeon.measure.heads.sites import count
from leansurgeon.progress import track

ALPHA = 0.05


class Ablated(TypedDict):
    """A masked model against the whole one, in the order of the samples."""

    change: float
    standard_error: float | None
    p: float | None
    p_holm: NotRequired[float | None]
    accuracy_change: NotRequired[float]


def one_off(bench: HeadScorer) -> list[Ablated]:
    """For every head of the model, in the order of its sites: the mean change of the loss when it alone is off, with
    its standard error, p and Holm's p (None where no test is made), and the change of accuracy.
    """
    rows: list[Ablated] = []
    whole, tests = bench.whole, not isinstance(bench.judge, Unlabelled)
    for head in track(range(count(bench.sites)), "one head off", "heads/s"):
        keep = np.ones(count(bench.sites), bool)
        keep[head] = False
        masked = bench.scores(keep)
        differences = masked.losses - whole.losses
        n = len(differences)
        error = float(differences.std(ddof=1) / np.sqrt(n)) if n > 1 else None
        row = {"change": float(differences.mean()), "standard_error": error}
        row["p"] = paired_p(differences) if tests else None
        if whole.accuracy is not None:
            row["accuracy_change"] = masked.accuracy - whole.accuracy
        rows.append(row)
    raw = [row["p"] for row in rows]
    corrected = raw if None in raw else holm(np.array(raw)).tolist()  # all of them have a test, or none
    for row, p in zip(rows, corrected, strict=True):
        row["p_holm"] = p
    return rows


def paired_p(differences: np.ndarray) -> float | None:
    """Two-sided p of Student's paired t-test; 1 where nothing differs, None with a single sample."""
    from scipy import stats

    if len(differences) < 2:
        return None
    if not differences.any():
        return 1.0
    return float(stats.ttest_1samp(differences, 0.0).pvalue)


def holm(p: np.ndarray) -> np.ndarray:
    """Holm's (1979) adjusted p-values: the i-th smallest times (m - i + 1), made monotone, at most 1."""
    order = np.argsort(p, kind="stable")
    adjusted = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)).clip(max=1.0)
    back = np.empty(len(p))
    back[order] = adjusted
    return back


def matters(row: Ablated) -> bool:
    """Whether a head's absence shows after correction."""
    return row["p_holm"] is not None and row["p_holm"] < ALPHA
