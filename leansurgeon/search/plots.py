"""The picture of a search: score against parameters."""

from __future__ import annotations

from pathlib import Path

from leansurgeon.report.charts.forms import Chart, Label, Point, Series, lines
from leansurgeon.report.charts.render import save
from leansurgeon.report.charts.scales import COUNT, PERCENT, PLAIN, Axis
from leansurgeon.search.findings import find_front
from leansurgeon.search.outcome import Outcome


def draw(outcome: Outcome, folder: Path) -> list[Path]:
    """`search.svg`, `.png` and `.pdf` in a folder that `report.places.check_folder` has made."""
    return save(picture(outcome), folder / "search")


def picture(outcome: Outcome) -> Chart:
    """One series for each rung, the Pareto front of the last one as a line, the source, and who won against whom."""
    everyone, last = outcome.everyone, outcome.rungs[-1]
    label = next(iter(outcome.rungs[0].values())).score or last[outcome.winner.name].score
    series = []
    for rung, results in zip(outcome.schedule, outcome.rungs, strict=True):
        scores = [(c.parameters, results[name].score) for name, c in everyone.items() if name in results]
        points = tuple(Point(x, score.value) for x, score in scores if score)
        series.append(Series(rung.length, points, rung.number, joined=False))
    front = sorted((everyone[n].parameters, outcome.scores(n)[-1].value) for n in find_front(outcome))
    series.append(Series("Pareto front", tuple(Point(*at) for at in front), len(series) + 1, marks=False))
    if score := last[outcome.original.name].score:
        series.append(
            Series("source", (Point(outcome.original.parameters, score.value),), len(series) + 1, joined=False)
        )
    names = [c.name for c in (outcome.winner, outcome.control) if c and outcome.scores(c.name)]
    labels = [Label(everyone[n].parameters, outcome.scores(n)[-1].value, n) for n in names]
    up = Axis(label.label, PERCENT if label.percent else PLAIN)
    drawing = lines(series, Axis("parameters", COUNT), up, labels=labels)
    return Chart("search", f"{label.label} against parameters", "One series for each rung.", drawing)
