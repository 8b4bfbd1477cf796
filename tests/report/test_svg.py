"""Charts: places on the page in proportion to their numbers, ticks that fit, lines cut where they should be."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from leansurgeon.report import plots
from leansurgeon.report.html_style import SERIES
from leansurgeon.report.svg import APART, DASHES, Series, bars, chart, cropped, dodged, form, log_ticks, mark, ticks

NS = "{http://www.w3.org/2000/svg}"


def drawn(figure: str) -> ElementTree.Element:
    """The drawing itself, which must be XML on its own."""
    start = figure.index("<svg xmlns")
    return ElementTree.fromstring(figure[start : figure.index("</svg>", start) + len("</svg>")])


def circles(figure: str) -> list[tuple[float, float]]:
    return [(float(c.get("cx")), float(c.get("cy"))) for c in drawn(figure).iter(f"{NS}circle")]


@pytest.mark.parametrize("log", [False, True], ids=["linear", "log"])
def test_places_are_in_proportion(log):
    values = (1.0, 10.0, 55.0, 1000.0)
    made = chart([Series("a", tuple(enumerate(values, 1)))], "t", "s", x_label="x", y_label="y", log=log)
    places = circles(made)
    xs = [x for x, _ in places]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.02) == pytest.approx(xs[3] - xs[2], abs=0.02)
    shown = [math.log(v) if log else v for v in values]
    share = [(v - shown[0]) / (shown[-1] - shown[0]) for v in shown]
    ys = [y for _, y in places]
    assert [(y - ys[0]) / (ys[-1] - ys[0]) for y in ys] == pytest.approx(share, abs=1e-3)
    assert ys[-1] < ys[0]  # larger is higher up
    assert all(0 <= x <= 360 and 0 <= y <= 220 for x, y in places)


def test_error_bars_reach_one_deviation_to_each_side():
    points = [Series("a", ((1.0, 10.0), (2.0, 20.0)), 0, (4.0, 0.0))]
    made = chart(points, "t", "s", x_label="x", y_label="y")
    unit = (circles(made)[0][1] - circles(made)[1][1]) / 10
    way = next(p.get("d") for p in drawn(made).iter(f"{NS}path") if "V" in p.get("d"))
    top, bottom = float(way.split(" ")[1].split("V")[0]), float(way.split("V")[1])
    assert abs(top - bottom) == pytest.approx(8 * unit, abs=0.05)


def test_a_bound_is_hollow_and_a_missing_point_no_point():
    made = chart([Series("a", ((1.0, 2.0), (2.0, 4.0)), hollow=(False, True))], "t", "s", x_label="x", y_label="y")
    assert [c.get("class").split()[-1] for c in drawn(made).iter(f"{NS}circle")] == ["f0", "hollow"]
    assert chart([Series("a", ())], "t", "s", x_label="x", y_label="y") is None
    assert chart([Series("a", ((1.0, 0.0),))], "t", "s", x_label="x", y_label="y", log=True) is None


@pytest.mark.parametrize("low, high", [(0, 1), (0.913, 0.987), (150e3, 302154), (1e-9, 3e-9), (-2, 5), (7, 7)], ids=str)
def test_ticks_are_round_few_and_inside(low, high):
    found = ticks(low, high)
    assert 1 <= len(found) <= 6 and all(low - 1e-12 <= t <= high + 1e-12 for t in found)
    steps = {round(math.log10(b - a) % 1, 6) for a, b in pairwise(found)}
    assert len(steps) <= 1 and steps <= {round(math.log10(m) % 1, 6) for m in (1, 2, 2.5, 5)}


@pytest.mark.parametrize("low, high", [(23, 1200), (1e-4, 2.5), (0.9, 1.1), (25, 90), (1e3, 1e12)], ids=str)
def test_log_ticks_are_inside(low, high):
    found = log_ticks(low, high)
    assert len(found) > 2 and all(low / 1.001 <= t <= high for t in found) and len(found) <= 12


def test_equal_places_stand_side_by_side():
    found = dodged([100.0, 100.0, 101.0, 300.0])
    assert found[3] == 300.0
    assert all(abs(a - b) >= 0.9 * APART for i, a in enumerate(found) for b in found[:i])
    assert sum(found[:3]) / 3 == pytest.approx(100.3, abs=1)


def test_the_steep_beginning_is_cut_at_the_crossing():
    steep = Series("a", ((0.0, 0.0), (5.0, 0.9), (10.0, 0.95), (20.0, 0.96)))
    flat = Series("b", ((0.0, 0.92), (20.0, 0.97)))
    (a, b), edge = cropped([steep, flat], True)
    assert edge == 0.9 and b == flat
    assert a.points == steep.points[1:]  # nothing twice where a point lies on the edge
    (a, _), edge = cropped(
        [Series("a", ((0.0, 1000.0), (10.0, 30.0), (20.0, 20.0))), Series("b", ((0.0, 25.0),))], False
    )
    assert edge == 30.0 and a.points[0] == (10.0, 30.0)
    (a, _), _ = cropped([Series("a", ((0.0, 0.0), (10.0, 0.96), (20.0, 0.98))), flat], True)
    # b has 0.96 to 0.98 but for its start, and 0.92 is further off than these 0.02: the axis begins at 0.96.
    assert a.points == ((10.0, 0.96), (20.0, 0.98))
    (a, b), edge = cropped([Series("a", ((0.0, 0.0), (10.0, 0.9), (20.0, 0.98))), flat], True)
    assert edge == 0.9 and b == flat  # here it is not
    even = [Series("a", tuple((5.0 * i, 0.1 + 0.2 * i) for i in range(5)))]
    assert cropped(even, True) == (even, None)
    # Evaluated before and after training only: the way between is all that there is to see.
    twice = [Series(name, ((0.0, 0.14), (2.0, end))) for name, end in (("a", 0.622), ("b", 0.624))]
    assert cropped(twice, True) == (twice, None) and cropped(twice[:1], True) == (twice[:1], None)


def test_bars_are_as_wide_as_their_numbers():
    made = bars([("a", [1, 3]), ("b", [0, 8])], ["p", "q"], "t", "s", str)
    widths = [float(r.get("width")) for r in drawn(made).iter(f"{NS}rect")]
    assert widths == pytest.approx([45.0, 135.0, 0.0, 360.0])
    starts = [float(r.get("x")) for r in drawn(made).iter(f"{NS}rect")]
    assert starts == pytest.approx([0.0, 45.0, 0.0, 0.0])
    assert bars([], ["p"], "t", "s", str) is None


def test_without_colour_six_arms_are_told_apart_and_with_it_thirty_six():
    """`leansurgeon run` has five arms, and paper may be black and white."""
    looks = [re.sub(r'class="[^"]*"', "", mark(0, 0, style)) for style in range(SERIES)]
    assert len(set(looks)) == len({DASHES[form(style)] for style in range(SERIES)}) == SERIES
    assert len(set(plots.MARKS)) == len(set(plots.DASHES)) == SERIES == len(DASHES)
    assert len({(style % SERIES, form(style)) for style in range(36)}) == 36
