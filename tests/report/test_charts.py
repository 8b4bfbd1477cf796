"""Every chart is held to its data: the numbers of the summaries and of metrics.jsonl, read from the specification.

The digits experiment of `report_workspace` has three arms, three seeds and everything measured.
"""

from __future__ import annotations

import json
import statistics
import xml.etree.ElementTree as ElementTree

import pytest

from leansurgeon.report.charts import sections as drawn
from leansurgeon.report.charts.forms import (
    COLOURS,
    PERCENT,
    PLAIN,
    Axis,
    Chart,
    Point,
    Series,
)
from leansurgeon.report.charts.forms import lines as drawing
from leansurgeon.report.charts.render import svg
from leansurgeon.report.charts.sections import head_charts
from leansurgeon.report.collect import collect
from leansurgeon.report.runs import POINTS, HeadStudy, thin_points
from leansurgeon.report.sections import sections
from tests.support.report.chart_reading import axis, legend, lines, marks
from tests.support.report.report_fixtures import ARMS, kappa, summary, write
from tests.support.report.report_workspace import HEADS, workspace

LOOK = {name: COLOURS[f"c{i}"][0] for i, name in enumerate(ARMS)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The digits experiment, with another loss for each arm so that no two curves are alike."""
    root = workspace(tmp_path_factory.mktemp("runs"))
    for i, arm in enumerate(ARMS):
        for seed in range(3):
            file = root / "digits-vit" / f"{arm}-s{seed}" / "metrics.jsonl"
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            for row in rows:
                row["loss"] *= 1 + i + seed / 10
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@pytest.fixture(scope="module")
def section(folder):
    (found,) = sections(collect([folder]).runs)
    return found


@pytest.fixture(scope="module")
def charts(section) -> dict[str, Chart]:
    return {chart.key: chart for chart in drawn.every(section)}


def test_accuracy_stands_over_parameters_with_one_deviation_to_each_side(charts):
    spec = charts["parameters"].spec
    points = {mark.at["color"]: mark for mark in marks(spec, "point")}
    bars = {mark.at["color"]: mark for mark in marks(spec, "rule")}
    for name, (_, _, _, parameters, accuracies, *_) in ARMS.items():
        mean, sd = statistics.fmean(accuracies), statistics.stdev(accuracies)
        assert points[LOOK[name]].xy == (parameters, pytest.approx(mean))
        bar = bars[LOOK[name]].at
        assert (bar["x"], bar["y"], bar["y2"]) == (parameters, pytest.approx(mean - sd), pytest.approx(mean + sd))
    assert len(points) == len(bars) == 3
    assert axis(spec, "x")["title"] == "parameters" and axis(spec, "y")["title"] == "top-1 accuracy"


@pytest.mark.parametrize(("chart", "kind", "key"), [("metric", "eval", "metric"), ("loss", "train", "loss")])
def test_curves_are_those_that_the_trainings_logged(charts, folder, chart, kind, key):
    found = lines(charts[chart].spec)
    expected = []
    for arm in ARMS:
        for seed in range(3):
            text = (folder / "digits-vit" / f"{arm}-s{seed}" / "metrics.jsonl").read_text()
            rows = [row for row in map(json.loads, text.splitlines()) if row["type"] == kind]
            # 690 steps are 30 epochs
            expected.append((LOOK[arm], [pytest.approx((row["step"] * 30 / 690, row[key])) for row in rows]))
    assert len(found) == 9 and all(one in found for one in expected)
    assert axis(charts[chart].spec, "x")["title"] == "epoch" and "seed" in charts[chart].says


def test_each_kappa_chart_draws_its_own_measure(tmp_path):
    run = summary(experiment=None, kappa=kappa((17.0, None, 95.0)))
    for i, layer in enumerate(run["kappa"]["layers"], 1):
        layer |= {"output": {"median": 10.0 * i}, "jacobian": {"at_least": 5.0 * i, "exact": False}}
    (made,) = sections(collect([write(tmp_path / "a", run)]).runs)
    charts = {chart.key: chart for chart in drawn.kappa_by_layer(made)}
    found = {key: dict(lines(chart.spec)).popitem()[1] for key, chart in charts.items()}
    assert found == {  # of the layer that lacks rank, there are lower bounds
        "kappa-median": [(1, 17), (2, 2.9e7), (3, 95)],
        "kappa-centred": [(1, 4.25), (2, 1e6), (3, 23.75)],
        "kappa-output": [(1, 10), (2, 20), (3, 30)],
        "kappa-jacobian": [(1, 5), (2, 10), (3, 15)],
    }
    filled = {key: [mark.look["filled"] for mark in marks(chart.spec, "point")] for key, chart in charts.items()}
    assert filled["kappa-jacobian"] == [False] * 3 and filled["kappa-output"] == [True] * 3
    hollow = [mark.xy[0] for mark in marks(charts["kappa-median"].spec, "point") if not mark.look["filled"]]
    assert hollow == [2]
    assert "at least" in charts["kappa-jacobian"].says and "at least" not in charts["kappa-output"].says
    spec = charts["kappa-median"].spec
    assert axis(spec, "y")["scale"]["type"] == "log" and axis(spec, "x")["title"] == "layer"


def test_importance_of_every_head(charts):
    spec = charts["lean-heads-importance"].spec
    found = {(mark.at["y"], mark.at["x"]): mark.at["fillOpacity"] for mark in marks(spec, "rect")}
    measured = {
        (str(a["layer"] + 1), head): value for a in HEADS["attentions"] for head, value in enumerate(a["importance"], 1)
    }
    assert found == measured and len(found) == 24
    of_labels = charts["lean-heads-pruning"].spec
    assert axis(of_labels, "y")["axis"]["labelExpr"] == PERCENT


def test_every_order_has_its_line():
    points = [{"fraction": 0.0, "loss": 1.0}, {"fraction": 0.5, "loss": 1.25}]
    orders = {"importance": points, "reverse": [{"fraction": 0.5, "loss": 3.0}]}
    spec = head_charts(HeadStudy.from_dict(HEADS | {"curve": {"orders": orders}}))[-1].spec
    found = legend(spec)
    assert [points[-1] for _, points in lines(spec)] == [(0.5, y) for y in (1.25, 3.0)]
    assert len(found) == 2 and [colour for colour, _ in lines(spec)] == list(found.values())
    assert axis(spec, "y")["title"] == "loss" and axis(spec, "y")["axis"]["labelExpr"] == PLAIN


def test_a_long_curve_keeps_its_peaks():
    """10,000 points become 240; the one that diverged is among them, as are both ends."""
    points = [(float(i), 1.0 + 0.1 * (i % 7)) for i in range(10_000)]
    points[4_321], points[7_000] = (4321.0, 50.0), (7000.0, -3.0)
    kept = thin_points(points)
    assert len(kept) <= POINTS and {points[0], points[4_321], points[7_000], points[-1]} <= set(kept)
    assert list(kept) == sorted(kept) and thin_points(points[:240]) == tuple(points[:240])


def test_a_loss_that_is_not_positive_makes_a_linear_axis_and_stays():
    series = [Series("a", (Point(1, 2.0), Point(2, -0.5)))]
    spec = Chart("k", "t", "s", drawing(series, Axis("x"), Axis("y", log=True))).spec
    assert [mark.xy for mark in marks(spec, "point")] == [(1, 2.0), (2, -0.5)]
    assert axis(spec, "y")["scale"].get("type") != "log"
    assert drawing([Series("a", ())], Axis("x"), Axis("y")) is None


def test_a_drawing_for_the_page_has_words_variables_for_colours_and_no_reach_outside(charts):
    assert len(charts) == 7
    for chart in charts.values():
        text = svg(chart)
        root = ElementTree.fromstring(text)
        assert root.get("role") == "img" and root.get("aria-label") == f"{chart.title}. {chart.says}"
        colours = {value for e in root.iter() for key, value in e.attrib.items() if key in ("fill", "stroke")}
        assert not {c for c in colours if c.startswith("#")} and any(c.startswith("var(--c") for c in colours)
        assert "href" not in text and "url(" not in text and " id=" not in text and "style=" not in text
    said = [e.text for e in ElementTree.fromstring(svg(charts["parameters"])).iter() if e.tag.endswith("title")]
    assert "lean, 152,394: 98.43 %" in said
