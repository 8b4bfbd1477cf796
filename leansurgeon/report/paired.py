"""Compare two rows on the same held-out samples: their difference, its 95 % confidence interval, and what can be
concluded.

Samples are paired by the batches that every run of an experiment was tested on. With several seeds, the interval
includes their spread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from leansurgeon.checkpoints.record import Comparison
from leansurgeon.intervals import degrees_of_freedom, errors_needed, paired_interval
from leansurgeon.report.humans import plain
from leansurgeon.report.rows import Row
from leansurgeon.report.runs import Task
from leansurgeon.training.runs.summary import OnTest

CLOSE = 1e-4  # relative tolerance for a metric that is the mean of its sums


@dataclass(frozen=True)
class Difference:
    """One row minus another in the metric's own unit (a fraction for percentages), or for perplexities the ratio, with
    the 95 % confidence interval `low` to `high`. `of_samples` is the standard error from samples alone (of a ratio: of
    its logarithm).
    """

    value: float
    low: float
    high: float
    samples: int
    of_samples: float
    ratio: bool = False
    unit: str = "samples"

    @property
    def sign(self) -> int:
        """1 or -1 if the interval shows which is larger; else 0."""
        level = 1.0 if self.ratio else 0.0
        return (self.low > level) - (self.high < level)

    def text(self, task: Task) -> str:
        """Return `-1.1 points, 95 %: -2.0 to -0.2, 612 held-out samples`."""
        if self.low == self.high == (1.0 if self.ratio else 0.0):
            return f"no difference on {self.samples:,} held-out {self.unit}"
        if self.ratio:
            figures = f"{self.value:.3f} times, 95 %: {self.low:.3f} to {self.high:.3f}"
        else:
            times, form, unit = (100, "+.1f", " points") if task.percent else (1, "+.4f", "")
            value, low, high = (f"{times * figure:{form}}" for figure in (self.value, self.low, self.high))
            figures = f"{value}{unit}, 95 %: {low} to {high}"
        return f"{figures}, {self.samples:,} held-out {self.unit}"


def compare(row: Row, other: Row) -> Difference | None:
    """Return the difference of two rows; None if a run of either did not keep its test sums, or the metric is not a
    mean over samples.
    """
    if row.runs and (judged := row.runs[0].compared) and other.role == "original":
        return of_comparison(judged, row.runs[0].task.metric) if row.runs[0].task else None
    tests = [[run.summary.test for run in one.runs] for one in (row, other)]
    every = [test for several in tests for test in several]
    if not every or any(test is None or not test.sums or test.best is None for test in every):
        return None
    counts = every[0].counts
    scales = {scale_of(test) for test in every}
    if any(test.counts != counts for test in every) or len(scales) > 1 or None in scales or len(counts) < 2:
        return None
    total = sum(counts)
    means = [[sum(test.sums) / total for test in several] for several in tests]
    batches = [[fmean(sums) for sums in zip(*(test.sums for test in several), strict=True)] for several in tests]
    value = fmean(means[0]) - fmean(means[1])
    low, high = paired_interval([a - b for a, b in zip(*batches, strict=True)], counts) or (value, value)
    half = (high - low) / 2
    of_samples = half / 2
    if min(map(len, means)) > 1:
        parts = [(stdev(several) / math.sqrt(len(several)), len(several)) for several in means]
        error = math.hypot(of_samples, *(part for part, _ in parts))
        half = errors_needed(degrees_of_freedom(error, parts)) * error if error else 0.0
    figures = value, value - half, value + half
    ratio = scales == {"log"}
    shown = map(math.exp, figures) if ratio else figures
    return Difference(*shown, samples=every[0].samples or 0, of_samples=of_samples, ratio=ratio)


def of_comparison(judged: Comparison, metric: str) -> Difference | None:
    """Return the difference of a model from the original in this metric, as measured with that; None without an
    interval.
    """
    near = judged.embeddings
    if metric == "cosine" and near and near.low is not None and near.high is not None:
        figures = near.cosine - 1, near.low - 1, near.high - 1
        return Difference(*figures, samples=near.samples, of_samples=(near.high - near.low) / 4)
    both = {"accuracy": judged.accuracy, "perplexity": judged.loss}.get(metric)
    if both is None or both.low is None or both.high is None:
        return None
    figures, ratio = (both.result - both.source, both.low, both.high), metric == "perplexity"
    shown = map(math.exp, figures) if ratio else figures
    unit = "tokens" if ratio else "samples"
    return Difference(*shown, samples=judged.scored or 0, of_samples=(both.high - both.low) / 4, ratio=ratio, unit=unit)


def scale_of(test: OnTest) -> str | None:
    """Return "mean" if the metric is the mean of its sums, "log" if it is the exponential of that; else None."""
    mean, metric = sum(test.sums) / max(sum(test.counts), 1), test.best.metric
    if metric is None:
        return None
    if math.isclose(metric, mean, rel_tol=CLOSE, abs_tol=1e-9):
        return "mean"
    return "log" if mean < 700 and math.isclose(metric, math.exp(mean), rel_tol=CLOSE) else None


def describe(row: Row, original: Row, controls: Sequence[Row], task: Task) -> list[str]:
    """Return what a lean row keeps and gains, and whether its heads are the reason; an empty list without paired
    samples.
    """
    found = compare(row, original)
    if found is None or row.metric is None:
        return []
    better = found.sign if task.higher_is_better else -found.sign
    told = found.text(task)
    if found.sign == 0:
        kept = f"{row.name} and {original.name} cannot be told apart in {task.label} ({told})"
    elif better > 0:
        kept = f"{row.name} is better than {original.name} in {task.label} ({told})"
    elif found.ratio:
        kept = f"{row.name} has a higher {task.label} than {original.name} ({told})"
    else:
        share = 100 * row.metric.mean / original.metric.mean if original.metric and original.metric.mean > 0 else 0.0
        kept = f"{row.name} keeps {share:.1f} % of the {task.label} ({told})"
        if task.metric == "cosine" or not share:
            kept = f"{row.name} keeps a {task.label} of {plain(row.metric.mean)} ({told})"
    kept += "."
    ours, theirs = row.latency, original.latency
    if ours and theirs and row.measured == original.measured:  # timed together, in turns
        if ours.low <= theirs.high and theirs.low <= ours.high:
            kept += " It is not shown to answer faster or slower on this machine."
        elif (faster := theirs.median / ours.median) >= 1:
            kept += f" It answers {faster:.1f} times as fast on this machine."
        else:
            kept += f" It takes {1 / faster:.1f} times as long to answer on this machine."
    said = [kept]
    for control in controls:
        if (apart := compare(row, control)) is None:
            continue
        ahead = apart.sign if task.higher_is_better else -apart.sign
        verdict = {
            0: f"More heads are not shown to help: {control.name} cannot be told apart from {row.name}",
            1: f"More heads help: {control.name} is behind {row.name}",
            -1: f"More heads cost here: {control.name} is ahead of {row.name}",
        }[ahead]
        said.append(f"{verdict} ({apart.text(task)}).")
    return said
