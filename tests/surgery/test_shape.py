"""The arithmetic of shapes: what a person reads, and which layers stay."""

from __future__ import annotations

import pytest

from leansurgeon.shape import Shape, Stage, evenly_per_stage


def shape(*depths: int) -> Shape:
    return Shape(tuple(Stage(depth, 4 * number, 8, 4, 48, 32) for number, depth in enumerate(depths, 1)))


def test_a_column_is_one_number_or_one_of_every_stage():
    assert shape(12).column("depth") == "12" and shape(12).column("heads") == "4"
    assert shape(2, 6).column("depth") == "2,6" and shape(2, 6).column("heads") == "4,8"
    assert shape(2, 6, 1).column("width") == "32,32,32"


@pytest.mark.parametrize(
    ("now", "wanted", "period", "kept"),
    [
        (6, 3, 1, (0, 2, 5)),
        (8, 4, 2, (0, 1, 6, 7)),
        (7, 6, 3, (0, 1, 2, 3, 4, 5)),  # the seventh is no whole group, and the result has no place for a part of one
        (7, 4, 3, (0, 1, 2, 6)),  # it ends in the same way
    ],
)
def test_layers_that_take_turns_stay_in_groups(now, wanted, period, kept):
    assert evenly_per_stage(shape(now), shape(wanted), period) == kept


def test_stages_are_counted_through():
    assert evenly_per_stage(shape(3, 4), shape(2, 2)) == (0, 2, 3, 6)


def test_layers_of_stages_are_counted_through():
    stages = shape(2, 6, 1)
    assert stages.spans == [range(2), range(2, 8), range(8, 9)]
    assert [stages.stage_of(layer) for layer in range(9)] == [0, 0, 1, 1, 1, 1, 1, 1, 2]
