"""The comparisons that examples/results/claim.md fixed before anything was run, from the runs of the claim-* recipes.

    python examples/claim/compare.py runs            # Markdown on stdout

For every task and question: the mean over seeds of the paired difference (pooled over the depths that were run) with
its 95 % interval, the paired t-test, Holm's correction over all comparisons, and where statsmodels is installed the
same difference by a mixed model (score by arm and depth, random intercept for the seed). Accuracy is in points, a loss
in percent of what the second arm of the pair has; positive is better.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from leansurgeon.training.runs import summary

TASKS = ("claim-fashion", "claim-text", "claim-retrieval")
QUESTIONS = (
    ("heads at equal parameters", "keep-4", "params-4"),
    ("heads at equal width", "split-4", "base"),
    ("lower kappa at equal heads", "low-kappa", "base"),
    ("higher kappa at equal heads", "high-kappa", "keep-4"),
    ("half the depth for four times the heads", "keep-4", "base"),
)
DEPTHS = {QUESTIONS[-1][0]: (2, 4)}  # of the two arms; elsewhere both have the same
WORTH = {"points": 0.5, "%": 1.0}
Scores = dict[tuple[str, int, int], float]  # by arm, depth and seed; higher is better


@dataclass(frozen=True)
class Difference:
    """One primary comparison of one task."""

    task: str
    question: str
    unit: str
    seeds: int
    mean: float
    half: float  # of the 95 % interval
    p: float
    mixed: tuple[float, float] | None  # estimate and half-width

    def holds(self, corrected: float) -> str:
        """What this task says: yes, worse, no, or undecided."""
        worth = WORTH[self.unit]
        if corrected < 0.05 and abs(self.mean) >= worth:
            return "yes" if self.mean > 0 else "worse"
        return "no" if abs(self.mean) + self.half <= worth else "undecided"


def collected(workspace: Path) -> dict[str, tuple[Scores, bool]]:
    """By task: the score of the last step of every finished run, and whether it is a share (accuracy)."""
    found: dict[str, tuple[Scores, bool]] = {}
    for folder in sorted(workspace.glob("claim-*/*-s*")):
        run = summary.read_if_whole(folder)
        task = next((name for name in TASKS if folder.parent.name in (name, f"{name}-2", f"{name}-6")), None)
        if run is None or task is None or run.experiment is None or run.final is None:
            continue
        metric = run.final.metric if run.task.percent or run.final.loss is None else run.final.loss
        depth = sum(stage["depth"] for stage in run.model.shape["stages"])
        scores, _ = found.setdefault(task, ({}, run.task.percent))
        scores[run.experiment.arm, depth, run.experiment.seed] = metric
    return found


def pairs(
    scores: Scores, first: str, second: str, depths: tuple[int, int] | None
) -> list[tuple[int, int, float, float]]:
    """`(seed, depth, score of the first arm, score of the second)` wherever both were run."""
    found = []
    for (arm, depth, seed), score in sorted(scores.items()):
        if arm != first or (depths and depth != depths[0]):
            continue
        other = scores.get((second, depths[1] if depths else depth, seed))
        if other is not None:
            found.append((seed, depth, score, other))
    return found


def compared(task: str, scores: Scores, percent: bool, question: tuple[str, str, str]) -> Difference | None:
    """One question on one task; None with fewer than two seeds."""
    name, first, second = question
    rows = pairs(scores, first, second, DEPTHS.get(name))
    by_seed = defaultdict(list)
    for seed, _, a, b in rows:
        by_seed[seed].append(gain(a, b, percent))
    values = np.array([np.mean(of_seed) for of_seed in by_seed.values()])
    if len(values) < 2:
        return None
    error = values.std(ddof=1) / math.sqrt(len(values))
    half = float(stats.t.ppf(0.975, len(values) - 1) * error)
    p = float(stats.ttest_1samp(values, 0.0).pvalue) if error > 0 else float(values.mean() == 0)
    unit = "points" if percent else "%"
    return Difference(task, name, unit, len(values), float(values.mean()), half, p, mixed(rows, percent))


def gain(score: float, other: float, percent: bool) -> float:
    """By how much `score` is better than `other`: points of accuracy, or percent of the loss."""
    return 100 * (score - other) if percent else 100 * (other - score) / other


def mixed(rows: list[tuple[int, int, float, float]], percent: bool) -> tuple[float, float] | None:
    """The difference by statsmodels' `MixedLM`, and half its 95 % interval; None without statsmodels."""
    try:
        from statsmodels.regression.mixed_linear_model import MixedLM
    except ImportError:
        return None
    mean = float(np.mean([b for *_, b in rows]))
    scale = 100.0 if percent else -100.0 / mean
    score = np.array([scale * value for _, _, a, b in rows for value in (a, b)])
    arm = np.tile([1.0, 0.0], len(rows))
    depths = np.repeat([depth for _, depth, *_ in rows], 2)
    fixed = [np.ones_like(arm), arm, *((depths == d).astype(float) for d in sorted(set(depths.tolist()))[1:])]
    with warnings.catch_warnings():  # a variance of seeds of zero is a finding and no trouble
        warnings.simplefilter("ignore")
        fitted = MixedLM(score, np.column_stack(fixed), groups=np.repeat([seed for seed, *_ in rows], 2)).fit()
    return float(fitted.params[1]), 1.96 * float(fitted.bse[1])


def holm(p: list[float]) -> list[float]:
    """Holm's step-down correction (1979), in the order given."""
    order, found, largest = np.argsort(p), [0.0] * len(p), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p) - rank) * p[i]))
        found[i] = largest
    return found


def answer(verdicts: list[str]) -> str:
    """The rule of claim.md: at least two of three tasks."""
    return next((word for word in ("yes", "worse", "no") if verdicts.count(word) >= 2), "undecided")


def table(differences: list[Difference]) -> list[str]:
    """The comparisons as lines of Markdown, and what they answer."""
    corrected = holm([one.p for one in differences])
    lines = [
        "| question | task | seeds | difference | 95 % | p (Holm) | mixed model | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    verdicts = defaultdict(list)
    for one, p in zip(differences, corrected, strict=True):
        verdicts[one.question].append(one.holds(p))
        model = "–" if one.mixed is None else f"{one.mixed[0]:+.2f} ± {one.mixed[1]:.2f}"
        lines.append(
            f"| {one.question} | {one.task.removeprefix('claim-')} | {one.seeds} | {one.mean:+.2f} {one.unit} "
            f"| ± {one.half:.2f} | {p:.3g} | {model} | {verdicts[one.question][-1]} |"
        )
    return [*lines, "", *(f"- {name}: **{answer(verdicts[name])}**" for name in verdicts)]


def main() -> int:
    """Print the table of a workspace; exit code 2 where no claim-* recipe was run in it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workspace", type=Path)
    found = collected(parser.parse_args().workspace)
    differences = [
        one
        for question in QUESTIONS
        for task, (scores, percent) in found.items()
        if (one := compared(task, scores, percent, question)) is not None
    ]
    if not differences:
        print("No claim-* recipe was run here with two seeds: leansurgeon run claim-retrieval", file=sys.stderr)
        return 2
    print("\n".join(table(differences)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
