"""Templates of tensors, and what is read of a config: sizes, switches, places in lists and ratios, all by hand."""

from __future__ import annotations

import pytest

from leansurgeon.architectures.families import read_families, read_tensors
from leansurgeon.architectures.tensors import (
    Tensor,
    axis_size,
    exact_ratio,
    exists,
    read_key,
    sizes_of,
    write_key,
)
from leansurgeon.errors import UnsupportedModel

DIMS = {"width": 10, "heads": 3, "q": 12, "kv": 4}


def test_an_axis_is_a_sum_of_products():
    assert [axis_size(axis, DIMS) for axis in ("7", "q", "q+kv+kv", "heads*4+q*kv", "2*3*heads")] == [7, 12, 20, 60, 18]
    assert sizes_of(("q+kv", "width"), DIMS) == (16, 10) and sizes_of((), DIMS) == ()
    with pytest.raises(UnsupportedModel, match="'mlp'"):
        sizes_of(("width", "mlp"), DIMS)


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ("", True),
        ("on", True),
        ("off", False),
        ("missing", False),
        ("!on", False),
        ("!off", True),
        ("!missing", True),
        ("size=16", True),
        ("size=8", False),
        ("missing=16", False),
        ("on=True", True),
    ],
)
def test_a_switch(when, expected):
    assert exists(when, {"on": True, "off": False, "size": 16}) is expected


CONFIG = {"a": 1, "dotted.key": 5, "depths": [2, 3, 4], "pairs": ((1, 2), (3, 4)), "none": None, "number": 7}


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("a", 1),
        ("missing", None),
        ("dotted.key", 5),
        ("depths.0", 2),
        ("depths.2", 4),
        ("depths.3", None),
        ("pairs.1.0", 3),
        ("pairs.0.1", 2),
        ("pairs.0.2", None),
        ("number.0", None),
        ("none.0", None),
        ("missing.0", None),
        ("=64", 64),
    ],
)
def test_a_key_is_read(key, expected):
    assert read_key(CONFIG, key) == expected


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


def rows(tensors):
    return [(t.name, t.role, " ".join(t.axes), t.when) for t in tensors]


def test_a_line_is_a_tensor_or_a_weight_and_its_bias():
    assert rows(read_tensors("up* up mlp,width,1,1")) == [
        ("up.weight", "up", "mlp width 1 1", ""),
        ("up.bias", "up", "mlp", ""),
    ]
    assert rows(read_tensors("cls embedding 1,1,width\nsteps buffer -")) == [
        ("cls", "embedding", "1 1 width", ""),
        ("steps", "buffer", "", ""),
    ]
    switched = list(read_tensors("up*  up  mlp,width  if=gated bias=mlp_bias group=1 new=0"))
    assert rows(switched) == [("up.weight", "up", "mlp width", "gated"), ("up.bias", "up", "mlp", "mlp_bias")]
    assert all((t.group, t.new) == (1, 0.0) for t in switched)
    assert [t.when for t in read_tensors("ln* norm width if=!a")] == ["!a", "!a"]
    first, others, some = read_tensors("a q q only=first\nb q q only=others\nc q q layers=1,3")
    assert (first.only, others.only) == ("first", "others")
    assert some.layers == (1, 3) and first.layers is None
    with pytest.raises(TypeError, match="grup"):
        list(read_tensors("a q q grup=1"))


def test_a_family_takes_over_what_stands_before_it():
    text = """
        [usual]
        library = "timm"
        keys = {depth = "depth", heads = "num_heads", width = "dim", mlp_dim = "units"}
        norm = "pre"
        outer = "a embedding width"
        [one]
        model_types = ["one", "uno"]
        decoupled = "other"
        takes = {special_tokens = "@one"}
        [two]
        from = "one"
        keys = {mlp_dim = "", mlp_ratio = "ratio"}
        decoupled = ""
    """
    one, two = dict(read_families(text)).values()
    assert (one.model_types, one.decoupled, one.keys.mlp_dim) == (("one", "uno"), "other", "units")
    assert (two.name, two.model_types, two.decoupled, two.norm) == ("two", ("two",), None, "pre")
    assert (two.keys.mlp_dim, two.keys.mlp_ratio, two.keys.width) == (None, "ratio", "dim")
    assert two.outer == one.outer == (Tensor("a", "embedding", ("width",)),)
    assert two.takes.special_tokens({}) == 1
