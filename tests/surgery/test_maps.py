"""Which old head, column or unit stands at which new place, and which layers stay, by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UsageError
from leansurgeon.shape import Shape, Stage, evenly, evenly_per_stage
from leansurgeon.surgery import drop_layers
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.operators import change_heads, change_units
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import (
    RequestedShape,
    key_value_heads,
    new_head_dim,
    number,
    ratios_per_stage,
)
from leansurgeon.surgery.transfer import (
    head_strength,
    map_added_heads,
    map_children,
    map_strongest_heads,
    strongest_units,
    widen,
)


def stage(heads: int, kv_heads: int | None = None, head_dim: int = 4, depth: int = 1) -> Stage:
    return Stage(depth, heads, head_dim, kv_heads or heads, 48, 32)


def lists(*arrays: np.ndarray) -> list[list[int]]:
    return [array.tolist() for array in arrays]


def test_new_heads_stand_behind_the_old_ones_of_their_group():
    assert lists(*map_added_heads(stage(2), stage(4))) == [[0, 1, -1, -1], [0, 1, -1, -1]]
    assert lists(*map_added_heads(stage(4, 2), stage(6, 2))) == [[0, 1, -1, 2, 3, -1], [0, 1]]


def test_children_share_the_columns_of_their_parent():
    queries, values, columns = lists(*map_children(stage(2), stage(4)))
    assert queries == values == [0, 0, 1, 1]
    assert columns == [0, 1, -1, -1, -1, -1, 2, 3, 4, 5, -1, -1, -1, -1, 6, 7]
    queries, values, columns = lists(*map_children(stage(2, 1, 5), stage(4, 1, 5)))  # 3 and 2 of 5
    assert (queries, values) == ([0, 0, 1, 1], [0])
    assert columns[:10] == [0, 1, 2, -1, -1, -1, -1, -1, 3, 4]


@pytest.mark.parametrize(
    ("before", "after", "strength", "kept", "keys"),
    [
        (stage(4), stage(2), [3, 1, 2, 3], [0, 3], [0, 3]),
        (stage(6, 2), stage(4, 2), [1, 3, 2, 9, 7, 8], [1, 2, 3, 5], [0, 1]),  # two of every group
        (stage(6, 3), stage(4, 2), [1, 9, 2, 3, 4, 5], [0, 1, 4, 5], [0, 2]),  # whole groups: sums of 10, 5, 9
        # Equal ones go in their order, and many do as few happen to.
        (stage(80, 40), stage(40, 20), [1] * 80, [*range(40)], [*range(20)]),
        (stage(80, 2), stage(40, 2), [1] * 80, [*range(20), *range(40, 60)], [0, 1]),
    ],
)
def test_the_strongest_heads_stay_in_their_order(before, after, strength, kept, keys):
    assert lists(*map_strongest_heads(before, after, np.array(strength, float))) == [kept, keys]


def test_a_head_is_as_strong_as_what_it_writes():
    output = np.array([[3.0, 0.0, 1.0, 1.0], [0.0, 4.0, 1.0, 1.0]])  # width 2, two heads of 2
    assert head_strength(output, 2).tolist() == [5.0, 2.0]


def test_the_strongest_units_by_the_product_of_their_norms():
    outgoing = np.array([[3.0, 1.0, 0.0], [4.0, 0.0, 2.0]])  # norms 5, 1, 2
    up = np.array([[1.0, 0.0], [6.0, 8.0], [0.0, 4.0]])  # 1, 10, 4
    assert strongest_units([up], outgoing, 2).tolist() == [1, 2]  # 5, 10, 8
    gate = np.array([[9.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert strongest_units([up, gate], outgoing, 2).tolist() == [0, 1]  # 45, 10, 8
    assert strongest_units([], np.ones((2, 40)), 20).tolist() == list(range(20))
    assert widen(2, 4).tolist() == [0, 1, -1, -1]


@pytest.mark.parametrize(
    ("step", "name", "exactness", "words"),
    [
        (change_heads(stage(2, 1), stage(4, 1), "split"), "split-heads", "exact", "the 1 key/value heads stay"),
        (change_heads(stage(2), stage(4)), "add-heads", "exact", "2 heads of 4"),
        (change_heads(stage(4, 2), stage(6, 2)), "add-heads", "exact", "the 2 key/value heads stay"),
        (change_heads(stage(4), stage(2), "split"), "trim-heads", "near", "2 heads"),
        (change_heads(stage(4), stage(2), by="named"), "trim-heads", "near", "named"),
        (change_units(6, 4), "trim-mlp", "near", "4 of 6"),
        (change_units(4, 6), "widen-mlp", "exact", "add 2 "),
    ],
)
def test_what_steps_say_of_heads_and_units(step, name, exactness, words):
    assert (step.name, step.exactness) == (name, exactness) and words in step.says


def test_heads_have_at_most_as_many_children_as_entries():
    assert change_heads(stage(2, head_dim=2), stage(4, head_dim=2), "split").name == "split-heads"
    with pytest.raises(UsageError, match=r"\b2\b.*\b3 children"):
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


def test_stages_are_columns_and_layers_are_counted_through_them():
    shape = Shape(tuple(Stage(depth, 4 * number, 8, 4, 48, 32) for number, depth in enumerate((2, 6, 1), 1)))
    assert (shape.column("depth"), shape.column("heads"), TWO.column("heads")) == ("2,6,1", "4,8,12", "4,4")
    assert Shape((stage(12),)).column("heads") == "12"
    assert shape.spans == [range(2), range(2, 8), range(8, 9)]
    assert [shape.stage_of(layer) for layer in range(9)] == [0, 0, 1, 1, 1, 1, 1, 1, 2]


def test_even_choice_of_layers():
    assert evenly(4, 2) == (0, 3) and evenly(6, 4) == (0, 2, 3, 5)
    assert evenly(12, 6) == (0, 2, 4, 7, 9, 11)  # DistilBERT's initialisation from BERT
    for depth in range(2, 40):
        for keep in range(2, depth + 1):
            kept = np.array(evenly(depth, keep))
            assert np.unique(kept).size == keep and kept[0] == 0 and kept[-1] == depth - 1
            assert np.abs(kept - np.linspace(0, depth - 1, keep)).max() < 0.5 + 1e-9


@pytest.mark.parametrize(
    ("now", "wanted", "period", "kept"),
    [
        (8, 4, 2, (0, 1, 6, 7)),
        (7, 6, 3, (0, 1, 2, 3, 4, 5)),  # the seventh is no whole group, and the result has no place for a part of one
        (7, 4, 3, (0, 1, 2, 6)),  # it ends in the same way
    ],
)
def test_layers_that_take_turns_stay_in_groups(now, wanted, period, kept):
    assert evenly_per_stage(Shape((stage(4, depth=now),)), Shape((stage(4, depth=wanted),)), period) == kept


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


@pytest.mark.parametrize(
    ("kept", "missing", "instead"),
    [
        ((0, 1, 4, 7), None, None),
        ((0, 2, 3, 5, 7), 1, "--keep 0,1,3,4,7."),
        ((0, 1, 5), 4, "--keep 0,1,4."),
        ((3, 5), 0, "stay."),  # one layer is fewer than the two that stay
    ],
)
def test_first_layers_stay_where_others_tell_them_by_their_number(kept, missing, instead, monkeypatch):
    """The advice: as many of each stage, of which the first have to stay, then the last of those that were named."""
    source = SimpleNamespace(architecture=SimpleNamespace(stay=(2, 1), stay_last=(), name="family"), shape=TWO)
    monkeypatch.setattr(drop_layers, "explain_misplaced", drop_layers.explain_tied_start)
    drop_layers.refuse_misplaced(source, "fresh", kept)
    if missing is None:
        drop_layers.refuse_misplaced(source, "transfer", kept)
        return
    with pytest.raises(UsageError, match=rf"Layer {missing} ") as caught:
        drop_layers.refuse_misplaced(source, "transfer", kept)
    assert caught.value.hint.endswith(instead)


def test_a_layer_that_would_lose_its_norm_as_the_first_one_is_refused(saved):
    """ModernBERT's first layer has no norm before its attention."""
    opened = open_source(str(saved("modernbert")[0]))
    with pytest.raises(UsageError, match=r"layers\.1\.attn_norm\.") as caught:
        plan(opened, RequestedShape(), method=Method(keep="1,3"))
    keep = caught.value.hint.rpartition("--keep ")[2].rstrip(".")
    assert plan(opened, RequestedShape(), method=Method(keep=keep)).layers == (0, 3)
    assert plan(opened, RequestedShape(init="fresh"), method=Method(keep="1,3")).after.depth == 2
