"""The recipes of Figures 3 and 5: their arms are the figures' grids."""

from __future__ import annotations

import pytest

from leansurgeon.checkpoints.source import open_source
from leansurgeon.experiment.arms import list_wanted_shapes
from leansurgeon.paper import EXHIBITS
from leansurgeon.surgery.planning import plan
from leansurgeon.training.recipe.reading import load


@pytest.mark.parametrize("name", ["figure3", "figure3-cpu", "figure5", "figure5-cpu"])
def test_arms_are_the_papers_grid_and_controls_have_the_old_heads(name):
    recipe = load(name)
    source = open_source(recipe.source, config_changes=recipe.source_config)
    plans = {arm: plan(source, wanted) for arm, wanted in list_wanted_shapes(recipe, source).items()}
    stages = {arm: made.after.stages[0] for arm, made in plans.items()}
    controls = {arm: spec.control_of for arm, spec in recipe.arms.items() if spec.control_of}
    # The source has the proportions of ViT-B.
    first = stages["original"]
    assert (first.depth, first.heads, first.inner, first.mlp_dim) == (12, 12, first.width, 4 * first.width)
    assert source.config["initializer_range"] == pytest.approx(first.width**-0.5, rel=0.03)
    lean = [stage for arm, stage in stages.items() if arm not in controls]
    if name.startswith("figure3"):
        grid = {(int(row.printed.layers), int(row.printed.heads)) for row in EXHIBITS["fig3"].rows}
        assert {(stage.depth, stage.heads) for stage in lean} == grid and len(lean) == len(grid) == 18
        assert len({(stage.head_dim, stage.mlp_dim) for stage in lean}) == 1
    else:
        ratios = {(stage.depth, stage.heads, stage.mlp_dim / stage.width) for stage in lean} - {(12, 12, 4)}
        assert ratios == {(depth, heads, ratio) for depth in (6, 7, 8) for heads in (12, 16, 20) for ratio in (2, 4)}
    assert len(controls) == 3
    for control, lean_arm in controls.items():
        assert stages[control].heads == 12 < stages[lean_arm].heads
        totals = [plans[arm].parameters_after.total for arm in (control, lean_arm)]
        assert totals[0] == pytest.approx(totals[1], rel=1e-3)
