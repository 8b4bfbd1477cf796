"""A sweep over heads (the paper's figures 3 and 5): its curves, and the charts that show them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from leansurgeon.report.charts.forms import COLOURS
from leansurgeon.report.charts.sections import by_heads, sweep
from leansurgeon.report.collect import collect
from leansurgeon.report.sections import sections
from tests.support.report.chart_reading import axis, legend, lines, marks
from tests.support.report.report_fixtures import kappa, summary, write

METRIC = {2: 0.90, 4: 0.93, 8: 0.95, 12: 0.96, 16: 0.955}


def arm(root: Path, name: str, depth: int, heads: int, seed: int = 0, **given) -> None:
    """One run of a sweep; `given`: mlp, head_dim, init, initialised, off (of the metric) and control_of."""
    made = summary("lean", seed, "figure3")
    stage = {"depth": depth, "heads": heads, "kv_heads": heads, "mlp_dim": given.get("mlp", 384)}
    head_dim = given.get("head_dim", 16)
    made["model"]["shape"]["stages"][0] |= stage | {"head_dim": head_dim, "inner": heads * head_dim}
    made["model"]["surgery"] = {"initialised": given.get("initialised", "fresh")}
    made["experiment"] |= {"arm": name, "init": given.get("init", "fresh"), "control_of": given.get("control_of")}
    made["final"]["metric"] = METRIC[heads] - (0.01 if depth == 8 else 0.0) + given.get("off", 0.0)
    made["kappa"] = kappa((*[1000.0 * depth / heads] * (depth - 1), 1e4 * depth / heads))  # the last one is far worse
    write(root / "figure3" / f"{name}-s{seed}", made)


def curves(root: Path) -> dict[str, list[int]]:
    """The heads on every curve of a folder's runs."""
    (made,) = sections(collect([root]).runs)
    return {name: [heads for heads, _ in arms] for name, arms in sweep(made).items()}


def test_an_original_that_began_with_trained_weights_is_not_from_scratch(tmp_path):
    """As an experiment whose source is a trained checkpoint writes it: its original is no transfer from within."""
    arm(tmp_path, "original", 7, 12, initialised="transfer")
    for heads in (2, 4, 8):
        arm(tmp_path, f"h{heads}", 7, heads, init="transfer")
        arm(tmp_path, f"h{heads}-fresh", 7, heads)
    assert curves(tmp_path) == {
        "7 layers, from scratch": [2, 4, 8],
        "7 layers, cut from trained weights": [2, 4, 8, 12],
    }


@pytest.mark.parametrize(
    ("tried", "names"),
    [
        ({2: (32,), 4: (16,), 8: (8,)}, {"1 layer": [2, 4, 8]}),  # one inner width: no two head_dim of one number
        ({n: (16, 8) for n in (2, 4, 8)}, {f"1 layer, head_dim {d}": [2, 4, 8] for d in (8, 16)}),
        (  # an arm may stand on a curve of each kind
            {2: (32, 8), 4: (16, 8), 8: (8,)},
            {"1 layer, head_dim 8": [2, 4, 8], "1 layer, inner width 64": [2, 4, 8]},
        ),
        ({2: (16,), 4: (16,), 8: (8,)}, {}),  # neither stays: these differ in more than their heads
    ],
    ids=["one-inner-width", "two-head-dims", "one-of-each", "mixed"],
)
def test_arms_of_another_head_dim_are_on_a_curve_of_their_own(tried, names, tmp_path):
    for heads, dims in tried.items():
        for dim in dims:
            arm(tmp_path, f"h{heads}-d{dim}", 1, heads, head_dim=dim)
    assert curves(tmp_path) == names


def test_single_runs_are_no_sweep(tmp_path):
    for heads in (2, 4, 8):
        made = summary("lean", 0, None)
        made["model"]["shape"]["stages"][0]["heads"] = heads
        write(tmp_path / f"h{heads}", made)
    assert curves(tmp_path) == {}


def test_the_charts_show_metric_and_kappa_of_every_arm(tmp_path):
    """As recipes/figure3.yaml has its arms: the original is the 12 heads of the 12 layers; one arm has a control."""
    arm(tmp_path, "original", 12, 12, init="")
    for seed, off in enumerate((-0.01, 0.0, 0.01)):
        for heads in (16, 2, 4, 8):
            arm(tmp_path, f"l8-h{heads}", 8, heads, seed, off=off)
    for heads in (16, 2, 4, 8):
        arm(tmp_path, f"l12-h{heads}", 12, heads)
    arm(tmp_path, "l8-h16-control", 8, 12, control_of="l8-h16")
    arm(tmp_path, "l6-h2", 6, 2)  # a point alone is no curve
    (section,) = sections(collect([tmp_path]).runs)
    metric, of_kappa = by_heads(section)
    colours = {"12 layers": COLOURS["c0"][0], "8 layers": COLOURS["c1"][0]}
    assert legend(metric.spec) == legend(of_kappa.spec) == colours
    found = dict(lines(metric.spec))
    assert found[colours["12 layers"]] == [pytest.approx(point) for point in METRIC.items()]
    assert found[colours["8 layers"]] == [pytest.approx((h, METRIC[h] - 0.01)) for h in (2, 4, 8, 16)]
    bars = {mark.at["x"]: (mark.at["y"], mark.at["y2"]) for mark in marks(metric.spec, "rule")}
    assert bars == {h: pytest.approx((METRIC[h] - 0.02, METRIC[h])) for h in (2, 4, 8, 16)}
    found = dict(lines(of_kappa.spec))
    assert [y for _, y in found[colours["12 layers"]]] == pytest.approx([6000, 3000, 1500, 1000, 750])
    assert axis(metric.spec, "x")["title"] == axis(of_kappa.spec, "x")["title"] == "heads"
    assert axis(metric.spec, "x")["axis"]["tickMinStep"] == 1  # heads are whole
    assert re.search(r"\baccuracy\b.*\bheads\b", metric.title) and "between depths" in of_kappa.says
