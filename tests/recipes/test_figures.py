"""The recipes of Figures 3 and 5: their arms are the figures' grids, and a tiny one of each trains."""

from __future__ import annotations

from dataclasses import replace

import pytest

from leansurgeon.checkpoints.source import open_source
from leansurgeon.experiment.arms import base_arm, list_wanted_shapes
from leansurgeon.experiment.jobs import make_jobs
from leansurgeon.experiment.side_by_side import carry_out_job
from leansurgeon.paper import EXHIBITS
from leansurgeon.surgery.planning import plan
from leansurgeon.training.recipe.reading import load

BOTH = ["figure3", "figure3-cpu", "figure5", "figure5-cpu"]


def plans(name):
    """Recipe, and the plan of every arm."""
    recipe = load(name)
    source = open_source(recipe.source, config_changes=recipe.source_config)
    wanted = list_wanted_shapes(recipe, source)
    return recipe, {arm: plan(source, w) for arm, w in wanted.items()}


@pytest.mark.parametrize("name", BOTH)
def test_the_source_has_the_proportions_of_vit_b(name):
    recipe, found = plans(name)
    stage = found["original"].after.stages[0]
    assert (stage.depth, stage.heads, stage.inner, stage.mlp_dim) == (12, 12, stage.width, 4 * stage.width)
    flat = open_source(recipe.source, config_changes=recipe.source_config).config
    assert flat["initializer_range"] == pytest.approx(stage.width**-0.5, rel=0.03)


@pytest.mark.parametrize("name", ["figure3", "figure3-cpu"])
def test_figure_3_has_the_papers_grid(name):
    recipe, found = plans(name)
    grid = {(int(row.printed.words.layers), int(row.printed.words.heads)) for row in EXHIBITS["fig3"].rows}
    arms = {a: p.after.stages[0] for a, p in found.items() if recipe.arms[a].control_of is None}
    assert {(s.depth, s.heads) for s in arms.values()} == grid and len(arms) == len(grid) == 18
    assert len({(s.head_dim, s.mlp_dim) for s in arms.values()}) == 1


@pytest.mark.parametrize("name", ["figure5", "figure5-cpu"])
def test_figure_5_has_6_to_8_layers_and_two_mlp_ratios(name):
    recipe, found = plans(name)
    arms = {a: p.after.stages[0] for a, p in found.items() if recipe.arms[a].control_of is None and a != "original"}
    ratios = {(s.depth, s.heads, s.mlp_dim / s.width) for s in arms.values()}
    assert ratios == {(depth, heads, ratio) for depth in (6, 7, 8) for heads in (12, 16, 20) for ratio in (2, 4)}
    assert (7, 16, 2) in ratios  # the paper's lean ViT-B


@pytest.mark.parametrize("name", BOTH)
def test_controls_have_the_old_heads_and_equal_parameters(name):
    recipe, found = plans(name)
    controls = {arm: spec.control_of for arm, spec in recipe.arms.items() if spec.control_of}
    assert len(controls) == 3
    for control, lean in controls.items():
        a, b = found[control], found[lean]
        assert a.after.stages[0].heads == 12 < b.after.stages[0].heads
        assert abs(a.parameters_after.total / b.parameters_after.total - 1) < 1e-3


@pytest.mark.parametrize("name", ["figure3-cpu", "figure5-cpu"])
def test_one_arm_trains(name, tmp_path, monkeypatch):
    monkeypatch.setenv("LEANSURGEON_CACHE", str(tmp_path / "cache"))
    recipe = load(name, debug=True)
    source = open_source(recipe.source, config_changes=recipe.source_config)
    jobs = make_jobs(recipe, tmp_path, list_wanted_shapes(recipe, source), base_arm(recipe), parallel=1)
    arm = next(arm for arm, spec in recipe.arms.items() if spec.control_of)
    summary = carry_out_job(replace(jobs[arm, 0], prove=False, threads=1)).as_dict()
    assert summary["steps"] == 2 and summary["kappa"]
