"""What is written into a config: places in lists, and ratios that give back every width."""

import pytest

from leansurgeon.architectures.tensors import (
    exact_ratio,
    read_key,
    write_key,
)

CONFIG = {"a": 1, "dotted.key": 5, "depths": [2, 3, 4], "pairs": ((1, 2), (3, 4))}


@pytest.mark.parametrize(
    ("key", "changed"),
    [
        ("a", {"a": 9}),
        ("new", {"new": 9}),
        ("dotted.key", {"dotted.key": 9}),
        ("depths.1", {"depths": [2, 9, 4]}),
        ("pairs.1.0", {"pairs": [(1, 2), [9, 4]]}),
        ("=64", {}),
    ],
)
def test_a_key_is_written_into_a_copy_of_a_list(key, changed):
    config, depths = dict(CONFIG), list(CONFIG["depths"])
    write_key(config, key, 9)
    assert config == CONFIG | changed and CONFIG["depths"] == depths
    assert read_key(config, key) == (64 if key == "=64" else 9)


def test_a_ratio_gives_back_every_width_that_is_truncated():
    for width in (7, 10, 49, 192, 384, 768):
        for mlp_dim in range(1, 1200):
            ratio = exact_ratio(mlp_dim, width)
            assert int(width * ratio) == mlp_dim
            assert isinstance(ratio, int) == (mlp_dim % width == 0)
            assert abs(ratio - mlp_dim / width) <= 0.500001 / width
    # In doubles 61 / 7 * 7 is less than 61: half a unit more is written. Others stay as they are.
    assert int(7 * (61 / 7)) == 60 and exact_ratio(61, 7) == 61.5 / 7 and exact_ratio(15, 20) == 0.75
