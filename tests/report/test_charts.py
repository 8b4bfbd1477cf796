"""Every chart is held to its data: the numbers of the summaries and of metrics.jsonl, read from the specification.

The digits experiment of `report_workspace` has three arms, three seeds and everything measured.
"""

from __future__ import annotations

import json
import statistics
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from leansurgeon.report.charts import sections as drawn
from leansurgeon.report.charts.forms import (
    APART,
    COLOURS,
    DASHES,
    MARKS,
    PERCENT,
    PLAIN,
    SERIES,
    Axis,
    Chart,
    Point,
    Series,
    dodge,
    form,
)
from leansurgeon.report.charts.forms import lines as drawing
from leansurgeon.report.charts.render import save, svg
from leansurgeon.report.charts.sections import head_charts
from leansurgeon.report.collect import collect
from leansurgeon.report.runs import POINTS, heads_of, thin_points
from leansurgeon.report.sections import sections
from tests.support.report.chart_reading import axis, legend, lines, marks
from tests.support.report.report_fixtures import ARMS, kappa, summary, write
from tests.support.report.report_workspace import HEADS, workspace

LOOK = {name: COLOURS[f"c{i}"][0] for i, name in enumerate(ARMS)}
METRIC, LOSS = "metric", "loss"


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


def test_there_is_a_chart_for_all_that_was_measured(charts):
    assert set(charts) == {
        *("parameters", "metric", "loss", "kappa-median", "kappa-centred"),
        *("lean-heads-importance", "lean-heads-pruning"),
    }


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
    assert "standard deviation" in charts["parameters"].says


def logged(folder, arm: str, seed: int, kind: str, key: str) -> list[tuple[float, float]]:
    """(epoch, value) as the training wrote them, 690 steps for 30 epochs."""
    text = (folder / "digits-vit" / f"{arm}-s{seed}" / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    return [(row["step"] * 30 / 690, row[key]) for row in rows if row["type"] == kind]


@pytest.mark.parametrize(("chart", "kind", "key"), [(METRIC, "eval", "metric"), (LOSS, "train", "loss")], ids=str)
def test_curves_are_those_that_the_trainings_logged(charts, folder, chart, kind, key):
    spec = charts[chart].spec
    expected = [(LOOK[arm], logged(folder, arm, seed, kind, key)) for arm in ARMS for seed in range(3)]
    found = lines(spec)
    assert len(found) == 9
    for colour, points in expected:
        near = [
            (c, p) for c, p in found if c == colour and p == [(pytest.approx(a), pytest.approx(b)) for a, b in points]
        ]
        assert near, (colour, points)
    assert axis(spec, "x")["title"] == "epoch" and max(x for _, points in found for x, _ in points) == 30
    assert "seed" in charts[chart].says


@pytest.mark.parametrize(("key", "factor"), [("kappa-median", 1), ("kappa-centred", 0.25)])
def test_kappa_of_every_layer(charts, key, factor):
    spec = charts[key].spec
    found = {colour: points for colour, points in lines(spec)}
    for name, (*_, medians, _, _) in ARMS.items():
        assert found[LOOK[name]] == [(i, pytest.approx(factor * m)) for i, m in enumerate(medians, 1)], name
    assert sorted(mark.xy for mark in marks(spec, "point")) == sorted(p for points in found.values() for p in points)
    assert axis(spec, "y")["scale"]["type"] == "log" and axis(spec, "x")["title"] == "layer"


def test_each_kappa_chart_draws_its_own_measure(tmp_path):
    run = summary(experiment=None)
    for i, layer in enumerate(run["kappa"]["layers"], 1):
        layer |= {"output": {"median": 10.0 * i}, "jacobian": {"at_least": 5.0 * i, "exact": False}}
    (made,) = sections(collect([write(tmp_path / "a", run)]).runs)
    found = {chart.key: chart for chart in drawn.kappa_by_layer(made)}
    values = {key: [y for _, points in lines(chart.spec) for _, y in points] for key, chart in found.items()}
    assert values == {
        "kappa-median": [17, 44, 95],
        "kappa-centred": [4.25, 11, 23.75],
        "kappa-output": [10, 20, 30],
        "kappa-jacobian": [5, 10, 15],
    }
    hollow = {key: [mark.look["filled"] for mark in marks(chart.spec, "point")] for key, chart in found.items()}
    assert hollow["kappa-jacobian"] == [False] * 3 and hollow["kappa-output"] == [True] * 3
    assert "at least" in found["kappa-jacobian"].says and "at least" not in found["kappa-output"].says


def test_a_layer_that_lacks_rank_is_a_hollow_mark(tmp_path):
    run = summary(experiment=None, kappa=kappa((17.0, None, 95.0)))
    (made,) = sections(collect([write(tmp_path / "a", run)]).runs)
    chart = drawn.kappa_by_layer(made)[0]
    shown = {mark.xy[0]: (mark.xy[1], mark.look["filled"]) for mark in marks(chart.spec, "point")}
    assert shown == {1: (17, True), 2: (2.9e7, False), 3: (95, True)}


def test_importance_of_every_head(charts):
    spec = charts["lean-heads-importance"].spec
    found = {(mark.at["y"], mark.at["x"]): mark.at["fillOpacity"] for mark in marks(spec, "rect")}
    measured = {
        (str(a["layer"] + 1), head): value for a in HEADS["attentions"] for head, value in enumerate(a["importance"], 1)
    }
    assert found == measured and len(found) == 24
    scale = next(layer["encoding"]["fillOpacity"]["scale"] for layer in spec["layer"])
    assert scale == {"domain": [0, max(measured.values())], "range": [0, 1]}


def test_every_order_has_its_line():
    orders = {
        "importance": [{"fraction": 0.0, "loss": 1.0}, {"fraction": 0.5, "loss": 1.25}],
        "reverse": [{"fraction": 0.5, "loss": 3.0}],
    }
    document = HEADS | {"curve": {"orders": orders}}
    chart = head_charts(heads_of(document))[-1]
    found = legend(chart.spec)
    assert [points[-1] for _, points in lines(chart.spec)] == [(0.5, y) for y in (1.25, 3.0)]
    assert len(found) == 2 and [colour for colour, _ in lines(chart.spec)] == list(found.values())
    assert axis(chart.spec, "y")["title"] == "loss" and axis(chart.spec, "y")["axis"]["labelExpr"] == PLAIN
    told = [{"fraction": 0.5, "accuracy": 0.75}]
    of_labels = head_charts(heads_of(HEADS | {"curve": {"orders": {"importance": told}}}))[-1]
    assert axis(of_labels.spec, "y")["axis"]["labelExpr"] == PERCENT


def test_a_long_curve_keeps_its_peaks():
    """10,000 points become 240; the one that diverged is among them, as are both ends."""
    points = [(float(i), 1.0 + 0.1 * (i % 7)) for i in range(10_000)]
    points[4_321], points[7_000] = (4321.0, 50.0), (7000.0, -3.0)
    kept = thin_points(points)
    assert len(kept) <= POINTS and {points[0], points[4_321], points[7_000], points[-1]} <= set(kept)
    assert list(kept) == sorted(kept) and thin_points(points[:240]) == tuple(points[:240])


# -- axes -----------------------------------------------------------------------------------------


def test_a_loss_that_is_not_positive_makes_a_linear_axis_and_stays():
    series = [Series("a", (Point(1, 2.0), Point(2, -0.5)))]
    spec = Chart("k", "t", "s", drawing(series, Axis("x"), Axis("y", log=True))).spec
    assert [mark.xy for mark in marks(spec, "point")] == [(1, 2.0), (2, -0.5)]
    assert axis(spec, "y")["scale"].get("type") != "log"
    assert drawing([Series("a", ())], Axis("x"), Axis("y")) is None


def test_equal_places_stand_side_by_side():
    moved = dodge([100.0, 100.0, 101.0, 300.0], 300)
    assert moved[3] == 0 and sum(moved) == pytest.approx(0) and len(set(moved[:3])) == 3
    assert all(abs(a - b) >= 0.9 * APART for i, a in enumerate(moved[:3]) for b in moved[:i])


def test_without_colour_six_arms_are_told_apart_and_with_it_thirty_six():
    """`leansurgeon run` has five arms, and paper may be black and white."""
    assert len(set(DASHES)) == len(set(MARKS)) == SERIES == len({form(style) for style in range(SERIES)})
    assert len({(style % SERIES, form(style)) for style in range(36)}) == 36


# -- pictures -------------------------------------------------------------------------------------


def test_a_drawing_for_the_page_has_words_variables_for_colours_and_no_reach_outside(charts):
    for chart in charts.values():
        root = ElementTree.fromstring(svg(chart))
        assert root.get("role") == "img" and root.get("aria-label") == f"{chart.title}. {chart.says}"
        colours = {value for e in root.iter() for key, value in e.attrib.items() if key in ("fill", "stroke")}
        assert not {c for c in colours if c.startswith("#")} and any(c.startswith("var(--c") for c in colours)
        text = svg(chart)
        assert "href" not in text and "url(" not in text and " id=" not in text and "style=" not in text
    said = [e.text for e in ElementTree.fromstring(svg(charts["parameters"])).iter() if e.tag.endswith("title")]
    assert "lean, 152,394: 98.43 %" in said


def test_places_in_the_drawing_are_in_proportion():
    """The renderer itself: four points at equal steps of a logarithmic axis, larger ones higher up, all inside."""
    found = [Series("a", tuple(Point(i, 10.0**i) for i in range(4)), joined=False)]
    root = ElementTree.fromstring(svg(Chart("k", "t", "s", drawing(found, Axis("x"), Axis("y", log=True)))))
    moved = [e.get("transform") for e in root.iter() if e.tag.endswith("path") and e.get("fill") == "var(--c0)"]
    places = [tuple(map(float, m[len("translate(") : -1].split(","))) for m in moved]
    xs, ys = zip(*places, strict=True)
    assert [b - a for a, b in pairwise(xs)] == pytest.approx([xs[1] - xs[0]] * 3, abs=0.1)
    assert [b - a for a, b in pairwise(ys)] == pytest.approx([ys[1] - ys[0]] * 3, abs=0.1)
    assert ys[3] < ys[0]


def test_files_of_three_kinds(charts, tmp_path):
    files = save(charts["loss"], tmp_path / "x")
    assert [file.name for file in files] == ["x.svg", "x.png", "x.pdf"]
    words = "".join(ElementTree.parse(files[0]).getroot().itertext())
    assert "Training loss" in words and "epoch" in words
    assert files[1].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and files[2].read_bytes()[:5] == b"%PDF-"
    again = save(charts["loss"], tmp_path / "y")
    assert [file.read_bytes() for file in again[:2]] == [file.read_bytes() for file in files[:2]]
