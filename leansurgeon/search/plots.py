"""Pictures of a search, with matplotlib where it is there."""

from __future__ import annotations

from pathlib import Path

from leansurgeon.search import Outcome
from leansurgeon.search.verdict import pareto


def draw(outcome: Outcome, folder: Path) -> list[Path]:
    """Score against parameters, one series a rung, the front as a line: `search.png` and `search.svg` in a folder that
    `report.plots.check` has made.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    label = next(iter(outcome.rungs[0].values())).score or outcome.rungs[-1][outcome.winner.name].score
    scale = 100 if label.percent else 1
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for rung, results in zip(outcome.schedule, outcome.rungs, strict=True):
        points = [(c.parameters, results[n].score) for n, c in outcome.everyone.items() if n in results]
        known = [(x, scale * score.value) for x, score in points if score]
        axes.scatter(*zip(*known, strict=True), label=rung.length, s=18 + 14 * rung.number)
    last = outcome.rungs[-1]
    everyone = outcome.everyone
    line = sorted((everyone[n].parameters, scale * outcome.scores(n)[-1].value) for n in pareto(outcome))
    axes.plot(*zip(*line, strict=True), color="grey", linewidth=1, zorder=0, label="Pareto front")
    if score := last[outcome.original.name].score:
        axes.scatter([outcome.original.parameters], [scale * score.value], marker="x", color="black", label="source")
    for name in [c.name for c in (outcome.winner, outcome.control) if c and outcome.scores(c.name)]:
        at = (everyone[name].parameters, scale * outcome.scores(name)[-1].value)
        axes.annotate(name, at, (6, -3), textcoords="offset points", fontsize=8)
    axes.set_xlabel("parameters")
    axes.set_ylabel(f"{label.label}{' (%)' if label.percent else ''}")
    axes.legend(fontsize=8)
    files = [folder / f"search.{kind}" for kind in ("png", "svg")]
    for file in files:
        figure.savefig(file, dpi=150)
    plt.close(figure)
    return files
