"""A sweep over heads (the paper's figures 3 and 5): its curves, and the charts that show them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from leansurgeon.report.charts.forms import COLOURS
from leansurgeon.report.charts.sections import kappa_by_heads, metric_by_heads, sweep
from leansurgeon.report.collect import collect
from leansurgeon.report.rows import Section
from leansurgeon.report.sections import sections
from tests.support.report.chart_reading import axis, legend, lines, marks
from tests.support.report.report_fixtures import kappa, summary, write

METRIC = {2: 0.90, 4: 0.93, 8: 0.95, 12: 0.96, 16: 0.955}


def arm(
    root: Path,
    name: str,
    depth: int,
    heads: int,
    mlp: int = 384,
    init: str = "fresh",
    head_dim: int = 16,
    initialised: str = "fresh",
    seed: int = 0,
    off: float = 0.0,
    **extra,
) -> None:
    made = summary("lean", seed, "figure3")
    made["model"]["shape"]["stages"][0] |= {"depth": depth, "heads": heads, "kv_heads": heads, "mlp_dim": mlp}
    made["model"]["shape"]["stages"][0] |= {"head_dim": head_dim, "inner": heads * head_dim}
    made["model"]["surgery"] = {"initialised": initialised}
    made["experiment"] |= {"arm": name, "init": init, **extra}
    made["final"]["metric"] = METRIC[heads] - (0.01 if depth == 8 else 0.0) + off
    made["kappa"] = kappa((*[1000.0 * depth / heads] * (depth - 1), 1e4 * depth / heads))  # the last one is far worse
    write(root / "figure3" / f"{name}-s{seed}", made)


@pytest.fixture
def section(tmp_path) -> Section:
    """As recipes/figure3.yaml has its arms: the original is the 12 heads of the 12 layers; one arm has a control."""
    arm(tmp_path, "original", 12, 12, init="")
    for depth in (12, 8):
        for heads in (16, 2, 4, 8):
            arm(tmp_path, f"l{depth}-h{heads}", depth, heads)
    arm(tmp_path, "l8-h16-control", 8, 12, control_of="l8-h16")
    arm(tmp_path, "l6-h2", 6, 2)  # a point alone is no curve
    (made,) = sections(collect([tmp_path]).runs)
    return made


def test_there_is_a_curve_for_every_depth_in_the_order_of_the_heads(section):
    found = sweep(section)
    assert list(found) == ["12 layers", "8 layers"]
    assert [[heads for heads, _ in arms] for arms in found.values()] == [[2, 4, 8, 12, 16], [2, 4, 8, 16]]
    assert [row.metric.mean for _, row in found["12 layers"]] == pytest.approx(list(METRIC.values()))
    assert dict(found["12 layers"])[12].name == "original"


def test_mlps_and_arms_cut_from_trained_weights_make_curves_of_their_own(tmp_path):
    for mlp, init in ((192, "fresh"), (384, "fresh"), (384, "transfer")):
        for heads in (2, 4, 8):
            arm(tmp_path, f"h{heads}-m{mlp}-{init}", 7, heads, mlp, init)
    (made,) = sections(collect([tmp_path]).runs)
    names = list(sweep(made))
    expected = (r"\b7\b.*\b192\b.*\bscratch\b", r"\b7\b.*\b384\b.*\bscratch\b", r"\b7\b.*\b384\b.*\btrained\b")
    assert all(map(re.search, expected, names)) and len(names) == 3


def test_an_original_that_began_with_trained_weights_is_not_from_scratch(tmp_path):
    """As an experiment whose source is a trained checkpoint writes it: its original is no transfer from within."""
    arm(tmp_path, "original", 7, 12, initialised="transfer")
    for heads in (2, 4, 8):
        arm(tmp_path, f"h{heads}", 7, heads, init="transfer")
        arm(tmp_path, f"h{heads}-fresh", 7, heads)
    (made,) = sections(collect([tmp_path]).runs)
    heads = {name: [heads for heads, _ in arms] for name, arms in sweep(made).items()}
    assert heads == {"7 layers, from scratch": [2, 4, 8], "7 layers, cut from trained weights": [2, 4, 8, 12]}


@pytest.mark.parametrize(
    ("tried", "names"),
    [
        ({2: (32,), 4: (16,), 8: (8,)}, {"7 layers": [2, 4, 8]}),  # one inner width: no two head_dim of one number
        ({n: (16, 8) for n in (2, 4, 8)}, {f"7 layers, head_dim {d}": [2, 4, 8] for d in (8, 16)}),
        (
            {2: (32, 64), 4: (16, 32), 8: (8, 16)},
            {"7 layers, inner width 64": [2, 4, 8], "7 layers, inner width 128": [2, 4, 8]},
        ),
        (  # an arm may stand on a curve of each kind
            {2: (32, 8), 4: (16, 8), 8: (8,)},
            {"7 layers, head_dim 8": [2, 4, 8], "7 layers, inner width 64": [2, 4, 8]},
        ),
        ({2: (16,), 4: (16,), 8: (8,)}, {}),  # neither stays: these differ in more than their heads
    ],
    ids=["one-inner-width", "two-head-dims", "two-inner-widths", "one-of-each", "mixed"],
)
def test_arms_of_another_head_dim_are_on_a_curve_of_their_own(tried, names, tmp_path):
    for heads, dims in tried.items():
        for dim in dims:
            arm(tmp_path, f"h{heads}-d{dim}", 7, heads, head_dim=dim)
    (made,) = sections(collect([tmp_path]).runs)
    assert {name: [heads for heads, _ in arms] for name, arms in sweep(made).items()} == names


def test_one_layer_is_singular(tmp_path):
    for heads in (2, 4, 8):
        arm(tmp_path, f"h{heads}", 1, heads)
    (made,) = sections(collect([tmp_path]).runs)
    assert list(sweep(made)) == ["1 layer"]


def test_single_runs_are_no_sweep(tmp_path):
    for heads in (2, 4, 8):
        made = summary("lean", 0, None)
        made["model"]["shape"]["stages"][0]["heads"] = heads
        write(tmp_path / f"h{heads}", made)
    (found,) = sections(collect([tmp_path]).runs)
    assert found.kind == "runs" and len(found.rows) == 3 and not sweep(found)


def test_the_charts_show_metric_and_kappa_of_every_arm(section):
    (metric,), (of_kappa,) = metric_by_heads(section), kappa_by_heads(section)
    colours = {"12 layers": COLOURS["c0"][0], "8 layers": COLOURS["c1"][0]}
    assert legend(metric.spec) == legend(of_kappa.spec) == colours
    found = dict(lines(metric.spec))
    assert [x for x, _ in found[colours["8 layers"]]] == [2, 4, 8, 16]
    assert [y for _, y in found[colours["8 layers"]]] == pytest.approx([0.89, 0.92, 0.94, 0.945])
    found = dict(lines(of_kappa.spec))
    assert [y for _, y in found[colours["12 layers"]]] == pytest.approx([6000, 3000, 1500, 1000, 750])
    assert axis(metric.spec, "x")["title"] == axis(of_kappa.spec, "x")["title"] == "heads"
    assert axis(metric.spec, "x")["axis"]["tickMinStep"] == 1  # heads are whole
    assert re.search(r"\baccuracy\b.*\bheads\b", metric.title) and "between depths" in of_kappa.says


def test_seeds_give_every_point_of_a_sweep_its_error_bar(tmp_path):
    for heads in (2, 4, 8):
        for seed, off in enumerate((-0.01, 0.0, 0.01)):
            arm(tmp_path, f"h{heads}", 7, heads, seed=seed, off=off)
    (made,) = sections(collect([tmp_path]).runs)
    (metric,) = metric_by_heads(made)
    found = {mark.at["x"]: (mark.at["y"], mark.at["y2"]) for mark in marks(metric.spec, "rule")}
    assert found == {h: (pytest.approx(METRIC[h] - 0.01), pytest.approx(METRIC[h] + 0.01)) for h in (2, 4, 8)}
