"""The comparisons that examples/results/claim.md fixed before anything was run, from the runs of the claim-* recipes.

    python examples/claim/compare.py runs            # Markdown on stdout

For every task and question: the mean over seeds of the paired difference (pooled over the depths that were run) with
its 95 % interval, the paired t-test, Holm's correction over all primary comparisons, and where statsmodels is installed
the same difference by a mixed model (score by arm and depth, random intercept for the seed). Accuracy and variance are
in points, a loss in percent of what the second arm of the pair has; positive is better. Then the secondary comparisons
(the pooled questions at each depth alone among them), whose p is not corrected, what a halved kappa goes with among
trainings of one arm, and the arms: score, parameters, kappa, and whether training had come to its end; the other
measures of conditioning at last.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy import stats

from leansurgeon.training.runs import summary
from leansurgeon.training.runs.folder import METRICS

QK = "-qk"  # at the end of a recipe's name, and then of its arms': queries and keys are normalised
TASKS = ("claim-fashion", "claim-text", "claim-retrieval")
QUESTIONS = (
    ("heads at equal parameters", "keep-4", "params-4"),
    ("heads at equal width", "split-4", "base"),
    ("lower kappa at equal heads", "sharp", "base"),
    ("more heads at high kappa", "even", "keep-4"),
    ("half the depth for four times the heads", "keep-4", "base"),
)
SECONDARY = (
    ("heads at equal inner width", "keep-4", "wide-4"),
    ("wider heads at equal parameters", "wide-4", "params-4"),
    ("heads at equal FLOPs", "keep-4", "flops-4"),
    ("twice the heads", "keep-2", "base"),
    ("twice the heads at equal width", "split-2", "base"),
    ("more heads at high kappa beside few", "even", "params-4"),
    ("balanced bases", "low-kappa", "base"),
    ("skewed bases", "high-kappa", "keep-4"),
    ("W + lambda I at the start", "low-kappa-start", "base"),
    ("kappa held low through training", "hold-low", "base"),
    ("more heads, kappa held high through training", "hold-high", "keep-4"),
    ("more heads, kappa held high, beside few heads", "hold-high", "base"),
    ("few heads, kappa held low, beside more heads", "hold-low", "keep-4"),
    ("QK norm", "base-qk", "base"),
    ("more heads, all with QK norm", "keep-4-qk", "base-qk"),
    ("half the depth, equal parameters, old heads", "params-4", "base"),
)
DEPTHS = {QUESTIONS[-1][0]: (2, 4), SECONDARY[-1][0]: (2, 4)}  # of the two arms; elsewhere both have the same
WORTH = {"points": 0.5, "%": 1.0}
MEASURES = ("centred κ", "κ of A·W_o", "Jacobian, at least")  # of a layer, beside κ itself
UNITS = {"claim-fashion": "points", "claim-retrieval": "points", "claim-text": "%"}
LOWER = ("claim-retrieval", "claim-text")  # is better: the share of the variance that is missed, the loss
Scores = dict[tuple[str, int, int], float]  # by arm, depth and seed


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


@dataclass(frozen=True)
class Run:
    """One training: its score at the last step, and what the table of arms says of it."""

    score: float
    parameters: int
    kappa: tuple[float, ...]  # median over layers of the median over samples: at the start, in the middle, at the end
    falling: float  # by which share the mean loss of the last tenth of the steps is below that of the tenth before
    beside: tuple[tuple[float, ...], ...] = ()  # at the same times, medians over layers: every one of `MEASURES`

    @classmethod
    def of(cls, folder: Path, score: float, parameters: int) -> Run:
        """The run in a folder."""
        rows = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
        measured = {
            row["step"]: row["layers"] for row in rows if row["type"] == "kappa"
        }  # a resumed run repeats a step
        kappa = tuple(float(np.median([layer["median"] for layer in layers])) for layers in measured.values())
        beside = tuple(map(conditioning, measured.values()))
        return cls(score, parameters, kappa, falling([row for row in rows if row["type"] == "train"]), beside)


def conditioning(layers: list[dict]) -> tuple[float, ...]:
    """Medians over layers of `MEASURES`; NaN where a layer lacks one."""
    each = [(one["centred_median"], one["output"]["median"], one["jacobian"]["at_least"]) for one in layers]
    rows = np.array(each, dtype=float)  # None becomes NaN
    return tuple(map(float, np.median(rows, axis=0)))


def falling(rows: list[dict]) -> float:
    """How much lower the loss is in the last tenth of the steps than in the one before, as a share of the latter."""
    last = rows[-1]["step"]
    before, end = (
        float(np.mean([r["loss"] for r in rows if last * low < r["step"] <= last * (low + 0.1)])) for low in (0.8, 0.9)
    )
    return (before - end) / before


def collected(workspace: Path) -> dict[str, dict[tuple[str, int, int], Run]]:
    """By task: every finished run by arm, depth and seed."""
    found: dict[str, dict[tuple[str, int, int], Run]] = {}
    for folder in sorted(workspace.glob("claim-*/*-s*")):
        run = summary.read_if_whole(folder)
        recipe, normed = folder.parent.name.removesuffix(QK), folder.parent.name.endswith(QK)
        task = next((name for name in TASKS if recipe in (name, f"{name}-2", f"{name}-6")), None)
        if run is None or task is None or run.experiment is None or run.final is None:
            continue
        score = run.final.loss if task == "claim-text" else run.final.metric
        depth = sum(stage["depth"] for stage in run.model.shape["stages"])
        key = run.experiment.arm + QK * normed, depth, run.experiment.seed
        found.setdefault(task, {})[key] = Run.of(folder, score, run.model.parameters)
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


def compared(task: str, scores: Scores, question: tuple[str, str, str]) -> Difference | None:
    """One question on one task; None with fewer than two seeds."""
    name, first, second = question
    rows = pairs(scores, first, second, DEPTHS.get(name))
    by_seed = defaultdict(list)
    for seed, _, a, b in rows:
        by_seed[seed].append(gain(task, a, b))
    values = np.array([np.mean(of_seed) for of_seed in by_seed.values()])
    if len(values) < 2:
        return None
    error = values.std(ddof=1) / math.sqrt(len(values))
    half = float(stats.t.ppf(0.975, len(values) - 1) * error)
    p = float(stats.ttest_1samp(values, 0.0).pvalue) if error > 0 else float(values.mean() == 0)
    return Difference(task, name, UNITS[task], len(values), float(values.mean()), half, p, mixed(task, rows))


def gain(task: str, score: float, other: float) -> float:
    """By how much `score` is better than `other`: points of accuracy or of the variance, or percent of the loss."""
    better = other - score if task in LOWER else score - other
    return 100 * better / (1.0 if UNITS[task] == "points" else other)


def mixed(task: str, rows: list[tuple[int, int, float, float]]) -> tuple[float, float] | None:
    """The difference by statsmodels' `MixedLM`, and half its 95 % interval; None without statsmodels."""
    try:
        from statsmodels.regression.mixed_linear_model import MixedLM
    except ImportError:
        return None
    mean = float(np.mean([b for *_, b in rows]))
    scale = (-100.0 if task in LOWER else 100.0) / (1.0 if UNITS[task] == "points" else mean)
    score = np.array([scale * value for _, _, a, b in rows for value in (a, b)])
    arm = np.tile([1.0, 0.0], len(rows))
    depths = np.repeat([depth for _, depth, *_ in rows], 2)
    fixed = [np.ones_like(arm), arm, *((depths == d).astype(float) for d in sorted(set(depths.tolist()))[1:])]
    with warnings.catch_warnings():  # a variance of seeds of zero is a finding and no trouble
        warnings.simplefilter("ignore")
        fitted = MixedLM(score, np.column_stack(fixed), groups=np.repeat([seed for seed, *_ in rows], 2)).fit()
    return float(fitted.params[1]), 1.96 * float(fitted.bse[1])


def holm(p: list[float], comparisons: int) -> list[float]:
    """Holm's step-down correction (1979) for so many comparisons, of which these are made so far, in their order."""
    order, found, largest = np.argsort(p), [0.0] * len(p), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (comparisons - rank) * p[i]))
        found[i] = largest
    return found


def answer(verdicts: list[str]) -> str:
    """The rule of claim.md: at least two of three tasks."""
    return next((word for word in ("yes", "worse", "no") if verdicts.count(word) >= 2), "undecided")


def asked(found: dict[str, Scores], questions: tuple[tuple[str, str, str], ...]) -> list[Difference]:
    """Every question that some task has the runs for, task by task."""
    answers = (compared(task, scores, question) for question in questions for task, scores in found.items())
    return [one for one in answers if one is not None]


def by_depth(found: dict[str, Scores]) -> list[Difference]:
    """Every question that is pooled over several depths at each of them alone."""
    made = []
    for question in QUESTIONS:
        for task, scores in found.items():
            depths = sorted({depth for _, depth, *_ in pairs(scores, *question[1:], None)})
            for depth in depths if len(depths) > 1 and question[0] not in DEPTHS else ():
                alone = compared(task, {key: score for key, score in scores.items() if key[1] == depth}, question)
                made += [replace(alone, question=f"{alone.question}, {depth} layers")] if alone else []
    return made


def secondary(differences: list[Difference]) -> list[str]:
    """Comparisons that decide nothing, as lines of Markdown."""
    head = ["| secondary: question | task | seeds | difference | 95 % | p |", "|---|---|---|---|---|---|"]
    return head + [
        f"| {one.question} | {one.task.removeprefix('claim-')} | {one.seeds} | {one.mean:+.2f} {one.unit} "
        f"| ± {one.half:.2f} | {one.p:.3g} |"
        for one in differences
    ]


def halved(task: str, runs: dict[tuple[str, int, int], Run]) -> tuple[int, float, float] | None:
    """Trainings, and by how much their score is better for each halving of kappa at the end, with half its 95 %
    interval: least squares over all trainings with a level of its own for every arm and depth, so that only seeds of
    one arm are compared. None where kappa was not measured, or says nothing.
    """
    groups = defaultdict(list)
    for (arm, depth, _), run in runs.items():
        if run.kappa and not arm.startswith("hold-"):  # where a penalty decides kappa
            groups[arm, depth].append((-math.log2(run.kappa[-1]), run.score))
    groups = {key: np.array(of_arm) for key, of_arm in groups.items() if len(of_arm) > 1}
    if not groups:
        return None
    x, score = np.concatenate([of_arm - of_arm.mean(0) for of_arm in groups.values()]).T
    freedom = len(x) - len(groups) - 1
    if freedom < 1 or np.abs(x).max() < 1e-9:  # octaves
        return None
    mean = np.concatenate(list(groups.values()))[:, 1].mean()
    y = score * (-100 if task in LOWER else 100) / (1 if UNITS[task] == "points" else mean)
    slope = float(x @ y / (x @ x))
    error = math.sqrt(float(((y - slope * x) ** 2).sum()) / freedom / float(x @ x))
    return len(x), slope, float(stats.t.ppf(0.975, freedom)) * error


def halvings(found: dict[str, dict[tuple[str, int, int], Run]]) -> list[str]:
    """What a halved kappa goes with among the seeds of one arm, as lines of Markdown."""
    lines = ["| within arms: κ halved | trainings | better by | 95 % |", "|---|---|---|---|"]
    for task, runs in found.items():
        made = halved(task, runs)
        if made:
            trainings, slope, half = made
            lines.append(f"| {task.removeprefix('claim-')} | {trainings} | {slope:+.2f} {UNITS[task]} | ± {half:.2f} |")
    return lines if len(lines) > 2 else []


def arms(found: dict[str, dict[tuple[str, int, int], Run]]) -> list[str]:
    """What every arm reached, as lines of Markdown: means over seeds, the standard deviation beside the score."""
    lines = [
        "| task | layers | arm | seeds | score | parameters | κ: start, middle, end | last tenth (worst seed) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for task, runs in found.items():
        for arm, depth in dict.fromkeys((arm, depth) for arm, depth, _ in runs):
            these = [run for (a, d, _), run in runs.items() if (a, d) == (arm, depth)]
            scores = np.array([run.score for run in these])
            spread = scores.std(ddof=1) if len(these) > 1 else math.nan
            percent = task != "claim-text"
            score = (
                f"{100 * scores.mean():.2f} ± {100 * spread:.2f} %"
                if percent
                else f"{scores.mean():.4f} ± {spread:.4f}"
            )
            kappa = ", ".join(f"{np.mean(each):,.0f}" for each in zip(*(r.kappa for r in these), strict=True)) or "–"
            fell = [run.falling * (100 * run.score if task == "claim-retrieval" else 100) for run in these]
            unit = "points" if task == "claim-retrieval" else "%"
            lines.append(
                f"| {task.removeprefix('claim-')} | {depth} | {arm} | {len(these)} | {score} "
                f"| {these[0].parameters:,} | {kappa} | {-np.mean(fell):+.2f} ({-max(fell):+.2f}) {unit} |"
            )
    return lines


def measures(found: dict[str, dict[tuple[str, int, int], Run]]) -> list[str]:
    """How else attention is conditioned at the start, in the middle and at the end of training, as lines of Markdown:
    means over seeds.
    """
    lines = [f"| task | layers | arm | {' | '.join(MEASURES)} |", "|---" * (3 + len(MEASURES)) + "|"]
    for task, runs in found.items():
        for arm, depth in dict.fromkeys((arm, depth) for arm, depth, _ in runs):
            each = [run.beside for (a, d, _), run in runs.items() if (a, d) == (arm, depth) and run.beside]
            if each:
                means = np.mean(each, axis=0).T  # measure by time
                told = " | ".join(", ".join(f"{value:,.0f}" for value in times) for times in means)
                lines.append(f"| {task.removeprefix('claim-')} | {depth} | {arm} | {told} |")
    return lines if len(lines) > 2 else []


def table(differences: list[Difference]) -> list[str]:
    """The primary comparisons as lines of Markdown, and what they answer."""
    corrected = holm([one.p for one in differences], len(QUESTIONS) * len(TASKS))
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
    scores = {task: {key: run.score for key, run in runs.items()} for task, runs in found.items()}
    differences = asked(scores, QUESTIONS)
    beside = [*by_depth(scores), *asked(scores, SECONDARY)]
    if not differences and not beside:
        print("No claim-* recipe was run here with two seeds: leansurgeon run claim-retrieval", file=sys.stderr)
        return 2
    print(
        "\n".join(
            [
                *table(differences),
                "",
                *secondary(beside),
                "",
                *halvings(found),
                "",
                *arms(found),
                "",
                *measures(found),
            ]
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
