"""Rows that tables of a model before and after surgery share."""

from __future__ import annotations

from leansurgeon.report.tables.shape_rows import parameters, shapes
from leansurgeon.shape import ParameterCount, Shape, Stage

STAGE = Stage(depth=4, heads=4, head_dim=8, kv_heads=2, mlp_dim=64, width=32)


def test_every_part_with_its_change():
    rows = parameters(ParameterCount(1000, 2000, 0, 5), ParameterCount(1000, 1500, 30, 5))
    assert rows == [
        ["parameters, embeddings", "1,000", "1,000", ""],
        ["parameters, attention", "2,000", "1,500", "-25.0 %"],
        ["parameters, MLP", "0", "30", "new"],
        ["parameters, rest", "5", "5", ""],
        ["parameters, all", "3,005", "2,535", "-15.6 %"],
    ]


def test_the_numbers_of_a_shape_that_are_asked_for():
    before, after = Shape((STAGE,)), Shape((STAGE,)).with_(depth=3, heads=8)
    assert shapes(before, after, ("depth", "inner")) == [["layers", "4", "3", ""], ["inner width", "32", "64", ""]]
    assert [label for label, *_ in shapes(before, after)][3:5] == ["key/value heads", "inner width"]
