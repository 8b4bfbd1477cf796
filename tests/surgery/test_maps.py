"""Which old head, column or unit stands at which new place, and which layers stay, by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UsageError
from leansurgeon.shape import Shape, Stage, evenly
from leansurgeon.surgery import drop_layers
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.operators import change_heads
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import (
    RequestedShape,
    key_value_heads,
    new_head_dim,
    number,
    ratios_per_stage,
)
from leansurgeon.surgery.transfer import (
    map_strongest_heads,
)


def stage(heads: int, kv_heads: int | None = None, head_dim: int = 4, depth: int = 1) -> Stage:
    return Stage(depth, heads, head_dim, kv_heads or heads, 48, 32)


def lists(*arrays: np.ndarray) -> list[list[int]]:
    return [array.tolist() for array in arrays]


@pytest.mark.parametrize(
    ("before", "after", "strength", "kept", "keys"),
    [
        (stage(4), stage(2), [3, 1, 2, 3], [0, 3], [0, 3]),
        (stage(6, 2), stage(4, 2), [1, 3, 2, 9, 7, 8], [1, 2, 3, 5], [0, 1]),  # two of every group
        (stage(6, 3), stage(4, 2), [1, 9, 2, 3, 4, 5], [0, 1, 4, 5], [0, 2]),  # whole groups: sums of 10, 5, 9
        # Equal ones go in their order, and many do as few happen to.
        (stage(80, 40), stage(40, 20), [1] * 80, [*range(40)], [*range(20)]),
    ],
)
def test_the_strongest_heads_stay_in_their_order(before, after, strength, kept, keys):
    assert lists(*map_strongest_heads(before, after, np.array(strength, float))) == [kept, keys]


def test_heads_have_at_most_as_many_children_as_entries():
    assert change_heads(stage(2, head_dim=2), stage(4, head_dim=2), "split").name == "split-heads"
    with pytest.raises(UsageError, match=r"\b2\b.*\binto 3"):
        change_heads(stage(2, head_dim=2), stage(6, head_dim=2), "split")
    with pytest.raises(UsageError, match=r"\b4 heads\b.*\b6\b.*\b4, 8\b"):
        change_heads(stage(4), stage(6), "split")


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("positions", "fits", "odd", "says"),
    [("rope", "6", "7", "even head_dim"), ("rope-2d", "12", "10", "that 4 divides")],
)
def test_rotary_positions_turn_numbers_in_groups(positions, fits, odd, says):
    arch = SimpleNamespace(positions=positions)
    assert new_head_dim(stage(4), 8, fits, arch) == int(fits)
    with pytest.raises(UsageError, match=says):
        new_head_dim(stage(4), 8, odd, arch)


def test_grouped_heads_keep_their_keys_or_their_groups():
    assert key_value_heads(stage(8), 12) == 12 and key_value_heads(stage(8, 2), 12) == 2
    assert key_value_heads(stage(8, 2), 16, whole_groups=True) == 4
    with pytest.raises(UsageError, match=r"\b7\b.*\b2\b.*\b6, 8\b"):
        key_value_heads(stage(8, 2), 7)


def test_a_factor_is_of_what_there_is_and_a_ratio_of_every_stage():
    assert number("2x", 6, "--heads", True) == 12 and number("0.5x", 6, "--heads", True) == 3
    assert number("0.5x", None, "--heads", True) == 1  # the spelling alone is right
    with pytest.raises(UsageError, match=r"0\.25 x 6 is 1\.5\b"):
        number("0.25x", 6, "--heads", True)
    assert ratios_per_stage(4, 3) == [4.0] * 3 and ratios_per_stage("2,3", 2) == [2.0, 3.0]
    with pytest.raises(UsageError, match=r"\b2\b.*\b3\b"):
        ratios_per_stage("2,3", 3)


# -- layers ----------------------------------------------------------------------------------------

TWO = Shape((stage(4, depth=4), stage(4, depth=6)))


def test_even_choice_of_layers():
    assert evenly(4, 2) == (0, 3) and evenly(6, 4) == (0, 2, 3, 5)
    assert evenly(12, 6) == (0, 2, 4, 7, 9, 11)  # DistilBERT's initialisation from BERT
    for keep in range(2, 40):
        kept = np.array(evenly(39, keep))
        assert np.unique(kept).size == keep and (kept[0], kept[-1]) == (0, 38)
        assert np.abs(kept - np.linspace(0, 38, keep)).max() < 0.5 + 1e-9


def test_layers_are_kept_as_they_are_named():
    cut = Shape((stage(4, depth=2), stage(4, depth=4)))
    named = drop_layers.without_data(TWO, cut, Method(keep="0,1,4,5,8,9"), period=2)
    assert (named.kept, named.criterion) == ((0, 1, 4, 5, 8, 9), "as listed")
    for keep in ("0,1,4,6", "1-2,4-5"):
        with pytest.raises(UsageError, match=r"\b2\b"):
            drop_layers.without_data(TWO, TWO, Method(keep=keep), period=2)
    after = Shape((stage(4, depth=2), stage(4, depth=3)))
    spaced = [drop_layers.without_data(TWO, after, Method(layers=name)) for name in ("auto", "first-of-each")]
    assert [choice.kept for choice in spaced] == [(0, 3, 4, 6, 9), (0, 2, 4, 6, 8)]


@pytest.mark.parametrize(
    ("keep", "layers", "says"),
    [
        ("0,10", None, r"\b0 to 9\b"),
        ("0,1", None, r"stage 2\b"),
        ("4,5", None, r"stage 1\b"),
        ("0,4", "1,2", r"\b1, 1 layers, not 1,2\b"),
    ],
)
def test_named_layers_are_counted_by_stage(keep, layers, says):
    assert drop_layers.with_kept(TWO, RequestedShape(), Method(keep="0,3,4,9")).layers == "2,2"
    with pytest.raises(UsageError, match=says):
        drop_layers.with_kept(TWO, RequestedShape(layers=layers), Method(keep=keep))


def test_a_layer_that_would_lose_its_norm_as_the_first_one_is_refused(saved):
    """ModernBERT's first layer has no norm before its attention."""
    opened = open_source(str(saved("modernbert")[0]))
    with pytest.raises(UsageError, match=r"layers\.1\.attn_norm\.") as caught:
        plan(opened, RequestedShape(), method=Method(keep="1,3"))
    keep = caught.value.hint.rpartition("--keep ")[2].rstrip(".")
    assert plan(opened, RequestedShape(), method=Method(keep=keep)).layers == (0, 3)
    assert plan(opened, RequestedShape(init="fresh"), method=Method(keep="1,3")).after.depth == 2
