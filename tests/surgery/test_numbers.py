"""What a plan says of layers and head sizes, in numbers worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from leansurgeon.errors import UsageError
from leansurgeon.shape import Stage
from leansurgeon.surgery.drop_layers import LayerChoice
from leansurgeon.surgery.operators import drop_layers
from leansurgeon.surgery.requested_shape import key_value_heads, new_head_dim, number, ratios_per_stage


def test_dropped_layers_are_those_that_are_not_kept():
    dropped = drop_layers(6, (0, 2, 5), LayerChoice((0, 2, 5), "given"))
    assert dropped.name == "drop-layers" and dropped.says.endswith("3 of 6 layers, given: 0, 2, 5")
    assert (dropped.settings["kept"], dropped.settings["dropped"]) == ([0, 2, 5], [1, 3, 4])


@pytest.mark.parametrize(
    ("positions", "fits", "odd", "says"),
    [("rope", "6", "7", "even head_dim"), ("rope-2d", "12", "10", "that 4 divides"), ("learned", "7", None, None)],
)
def test_rotary_positions_turn_numbers_in_groups(positions, fits, odd, says):
    stage, arch = Stage(2, 4, 8, 4, 64, 32), SimpleNamespace(positions=positions)
    assert new_head_dim(stage, 8, fits, arch) == int(fits)
    if odd:
        with pytest.raises(UsageError, match=says):
            new_head_dim(stage, 8, odd, arch)


def test_a_ratio_is_one_of_every_stage():
    assert ratios_per_stage(4, 3) == [4.0] * 3 and ratios_per_stage("2,3", 2) == [2.0, 3.0]
    with pytest.raises(UsageError, match=r"\b2\b.*\b3\b"):
        ratios_per_stage("2,3", 3)


def test_grouped_heads_keep_their_keys_or_their_groups():
    plain, grouped = Stage(2, 8, 8, 8, 64, 32), Stage(2, 8, 8, 2, 64, 32)
    assert key_value_heads(plain, 12) == 12 and key_value_heads(grouped, 12) == 2
    assert key_value_heads(grouped, 16, whole_groups=True) == 4
    with pytest.raises(UsageError, match=r"\b7\b.*\b2\b.*\b6, 8\b"):
        key_value_heads(grouped, 7)


def test_a_factor_is_of_what_there_is():
    assert number("2x", 6, "--heads", True) == 12 and number("0.5x", 6, "--heads", True) == 3
    assert number("0.5x", None, "--heads", True) == 1  # the spelling alone is right
    with pytest.raises(UsageError, match=r"0\.25 x 6 is 1\.5\b"):
        number("0.25x", 6, "--heads", True)
