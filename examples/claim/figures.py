"""The figures of examples/results/claim.md, drawn with the report's engine from the runs of the claim-* recipes.

    python examples/claim/figures.py runs examples/results/figures

One for the primary differences, and one for every task in which kappa was measured: score against kappa, arm by arm.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from compare import QUESTIONS, TASKS, WORTH, Difference, Run, asked, collected

from leansurgeon.report.charts.forms import LIGHT, PERCENT, PLAIN, WHOLE, Axis, Chart, Point, Series, lines

SHOWN = ("base", "keep-4", "params-4", "split-4", "sharp", "even", "wide-4")
HELD = ("base", "keep-4", "hold-low", "hold-high", "keep-2", "split-2")
APART = 0.12  # of a question: how far the marks of two tasks stand from each other
KAPPA = "median κ of a layer at the end of training"


def differences(made: list[Difference]) -> Chart:
    """Every primary difference with its interval, in units of what counts (0.5 points, 1 % of the loss)."""
    series = [
        Series(
            task.removeprefix("claim-"),
            tuple(
                Point(number + (place - 1) * APART, *(end / WORTH[one.unit] for end in ends(one)))
                for number, (question, *_) in enumerate(QUESTIONS, 1)
                for one in made
                if (one.task, one.question) == (task, question)
            ),
            style=place,
            joined=False,
        )
        for place, task in enumerate(TASKS)
    ]
    says = "; ".join(f"Q{number} {question}" for number, (question, *_) in enumerate(QUESTIONS, 1))
    drawing = lines(series, Axis("question", WHOLE), Axis("difference in thresholds", PLAIN))
    return Chart("claim-differences", "What each question found, with 95 % intervals", says, drawing)


def ends(one: Difference) -> tuple[float, float, float]:
    """A difference and the ends of its interval."""
    return one.mean, one.mean - one.half, one.mean + one.half


def by_kappa(
    task: str, runs: dict[tuple[str, int, int], Run], shown: tuple[str, ...], depth: int, key: str
) -> Chart | None:
    """The score of these arms at one depth against kappa at the end; None where kappa was not measured."""
    series = []
    for style, arm in enumerate(shown):
        these = [run for (name, layers, _), run in runs.items() if (name, layers) == (arm, depth) and run.kappa]
        if these:
            scores, kappa = np.array([run.score for run in these]), np.mean([run.kappa[-1] for run in these])
            spread = scores.std(ddof=1) if len(these) > 1 else 0.0
            point = Point(float(kappa), float(scores.mean()), *(float(scores.mean() + s * spread) for s in (-1, 1)))
            series.append(Series(arm, (point,), style, joined=False))
    name = task.removeprefix("claim-")
    label = "loss, nats a character" if name == "text" else "top-1 accuracy"
    drawing = lines(series, Axis(KAPPA, PLAIN, log=True), Axis(label, PLAIN if name == "text" else PERCENT))
    title = f"{name}, {depth} layers: score and κ by arm"
    says = "Means over seeds; the bar is one standard deviation to each side."
    return drawing and Chart(f"claim-{name}-{key}", title, says, drawing)


def main() -> int:
    """Write the figures as SVG; exit code 2 where there is nothing to draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workspace", type=Path)
    parser.add_argument("folder", type=Path)
    asked_for = parser.parse_args()
    found = collected(asked_for.workspace)
    made = asked({task: {key: run.score for key, run in runs.items()} for task, runs in found.items()}, QUESTIONS)
    if not found:
        print("No claim-* recipe was run here: leansurgeon run claim-retrieval", file=sys.stderr)
        return 2
    asked_for.folder.mkdir(parents=True, exist_ok=True)
    charts = [differences(made)] if made else []
    for task, runs in found.items():
        held = any(arm.startswith("hold-") for arm, *_ in runs)
        charts += [by_kappa(task, runs, SHOWN, 4, "kappa"), by_kappa(task, runs, HELD, 2, "held") if held else None]
    for chart in charts:
        if chart is not None:
            drawing = chart.drawing.properties(title=chart.title, background=LIGHT["ground"])
            drawing.save(str(asked_for.folder / f"{chart.key}.svg"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
