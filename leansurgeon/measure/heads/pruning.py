"""Measure how many heads a model can lose: its score by the fraction of heads switched off, in two orders.

importance   the least important heads of the whole model first (Michel et al., arXiv 1905.10650); layers may lose all
reverse      the most important first

Nothing is retrained in between, and importance is computed once.

Single heads are tested with each of them off alone, by Student's t on the differences of the samples' losses (masked
minus whole, sample by sample), two-sided; Holm's step-down over all heads keeps the chance of a single false alarm
below 5 % under any dependence between heads. The paper tests at p < 0.01 without a correction: of 144 heads that do
nothing, one or two would pass. With few or heavy-tailed samples t is rough; the number of samples is reported with it.

A model that is scored by its distance from itself is never closer than 0, so a test would always pass: none is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NotRequired, TypedDict

import numpy as np
from numpy import ndarray

from leansurgeon.checkpoints.model import Loaded
from leansurgeon.measure.data.batches import Batch
from leansurgeon.measure.heads.importance import importance
from leansurgeon.measure.heads.judge import HeadScorer, Labelled, OutputScorer, judge_of
from leansurgeon.measure.heads.sites import Site, count, sites, split
from leansurgeon.progress import track
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.tasks import Task

STEPS = 10
ALPHA = 0.05  # family-wise, over the tests of all heads
TOLERANCE = 0.01  # share of the whole model's score that may be lost


class Point(TypedDict):
    """One point of a pruning curve: the fraction and number of heads that are off, and the score without them."""

    fraction: float
    pruned: int
    loss: float
    accuracy: NotRequired[float]
    scores: NotRequired[dict[str, float]]


def at_epoch(
    loaded: Loaded,
    task: Task,
    fit: Sequence[Batch],
    judged: Sequence[Batch],
    *,
    steps: int,
) -> JsonObject:
    """Compute what `measure: {heads: {every: 10ep}}` writes: how important heads are now and how many can be pruned, so
    that a run shows how prunability grows during training (the paper's last figure).

    `loaded` is the model in training, plain (not DDP) on its device; `task` the task of the run. `fit` are a few
    training batches with labels, for the importance; `judged` are evaluation batches on which the masked model is
    scored `steps + 1` times (256 samples of each are plenty for a curve of ten steps). Batches may be on the CPU. The
    model's mode and gradients are left as they were; no random numbers are drawn, so a run stays reproducible.

    Returns numbers for JSON:

        prunable     largest fraction of heads that can go, least important first, while the score stays within 1 %
                     of the whole model's, at this and every smaller step
        curve        [{"fraction", "pruned", "loss", "accuracy" (classifiers)}] for 0, 1/steps, ... 1
        importance   {"share": [[of each head of all heads' sum] a layer], "gini": 0 (all alike) .. 1 (one head)}
        samples      {"fit", "judged"}
    """
    places = sites(loaded)
    judge = judge_of(loaded, task)
    scores = importance(judge, places, fit)
    bench = HeadScorer(judge, places, judged)
    rows = curve(bench, np.argsort(scores, kind="stable"), fractions(steps))
    total = scores.sum() or 1.0
    return {
        "prunable": prunable(rows, bench),
        "curve": rows,
        "importance": {"share": [(part / total).tolist() for part in split(scores, places)], "gini": gini(scores)},
        "samples": {"fit": sum(len(b["labels"]) for b in fit), "judged": len(bench.whole.losses)},
    }


def fractions(steps: int) -> list[float]:
    """Return 0 to 1 in equal steps."""
    return [i / steps for i in range(steps + 1)]


def curve(
    bench: HeadScorer, order: ndarray, asked: Sequence[float], step: Callable[[], None] = lambda: None
) -> list[Point]:
    """Return the scores with growing parts of an order switched off."""
    rows = []
    for fraction in asked:
        keep = np.ones(count(bench.sites), bool)
        keep[order[: round(fraction * len(order))]] = False
        gone = int((~keep).sum())
        rows.append({"fraction": gone / len(keep), "pruned": gone} | bench.scores(keep).as_dict())
        step()
    return rows


def strengths(places: Sequence[Site], values: ndarray) -> list[ndarray]:
    """Return the importance of each site's heads, summed over the layers of a stage that must keep the same heads."""
    parts = split(values, places)
    sums = {}
    for site, part in zip(places, parts, strict=True):
        if site.in_step:
            sums[site.stage, site.group] = sums.get((site.stage, site.group), 0) + part
    return [sums[site.stage, site.group] if site.in_step else part for site, part in zip(places, parts, strict=True)]


def prunable(rows: Sequence[Point], bench: HeadScorer) -> float:
    """Return the largest fraction up to which every step keeps the score.

    The score is accuracy if there are right answers, or a correlation or F1 (may fall by the share `TOLERANCE`), else
    the loss (may rise by the share `TOLERANCE`); for a model without labels the cosine with the whole model's output
    may fall by `TOLERANCE`.
    """
    best, whole = 0.0, bench.whole
    for point in rows:
        if whole.accuracy is not None:
            lost = whole.accuracy * (1 - TOLERANCE) - point["accuracy"]
        elif whole.scores:
            name, of_whole = next(iter(whole.scores.items()))
            lost = of_whole - TOLERANCE * abs(of_whole) - point["scores"][name]
        else:
            most = whole.loss * (1 + TOLERANCE) if isinstance(bench.judge, Labelled) else TOLERANCE
            lost = point["loss"] - most
        if lost > 1e-12:
            break
        best = point["fraction"]
    return best


def gini(values: ndarray) -> float:
    """Return the Gini coefficient: 0 if all are equal, near 1 if one has it all."""
    ordered = np.sort(np.asarray(values, float))
    n, total = len(ordered), ordered.sum()
    return float(2 * (np.arange(1, n + 1) * ordered).sum() / (n * total) - (n + 1) / n) if total > 0 else 0.0


def spearman(a: ndarray, b: ndarray) -> float | None:
    """Return the rank correlation; None if one of the two is constant."""
    from scipy import stats

    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(stats.spearmanr(a, b).statistic)


# -- one head off --------------------------------------------------------------------------------


class AblationResult(TypedDict):
    """A masked model compared with the whole one, sample by sample."""

    change: float
    standard_error: float | None
    p: float | None
    p_holm: NotRequired[float | None]
    accuracy_change: NotRequired[float]


def one_off(bench: HeadScorer) -> list[AblationResult]:
    """Return for every head of the model, in the order of its sites, the mean change of the loss with it alone off, its
    standard error, p and Holm's p (None if no test is made), and the change of accuracy.
    """
    rows = []
    whole, tests = bench.whole, not isinstance(bench.judge, OutputScorer)
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


def paired_p(differences: ndarray) -> float | None:
    """Return the two-sided p of Student's paired t-test; 1 if nothing differs, None with a single sample."""
    from scipy import stats

    if len(differences) < 2:
        return None
    if not differences.any():
        return 1.0
    return float(stats.ttest_1samp(differences, 0.0).pvalue)


def holm(p: ndarray) -> ndarray:
    """Return Holm's (1979) adjusted p-values: the i-th smallest times (m - i + 1), made monotone, at most 1."""
    order = np.argsort(p, kind="stable")
    adjusted = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)).clip(max=1.0)
    back = np.empty(len(p))
    back[order] = adjusted
    return back


def matters(row: AblationResult) -> bool:
    """Return whether a head's absence is significant after correction."""
    return row["p_holm"] is not None and row["p_holm"] < ALPHA
