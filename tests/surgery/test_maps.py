"""Which old head, column or unit stands at which new place, by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from leansurgeon.checkpoints.record import Step
from leansurgeon.errors import UsageError
from leansurgeon.shape import Shape, Stage
from leansurgeon.surgery import drop_layers, operators
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.operators import change_heads, change_units
from leansurgeon.surgery.requested_shape import RequestedShape
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
    halves = [[0, 1, -1, -1], [-1, -1, 2, 3], [4, 5, -1, -1], [-1, -1, 6, 7]]
    assert lists(*map_children(stage(2), stage(4))) == [
        [0, 0, 1, 1],
        [0, 0, 1, 1],
        [*halves[0], *halves[1], *halves[2], *halves[3]],
    ]
    queries, values, columns = map_children(stage(2, 1, 5), stage(4, 1, 5))  # 3 and 2 of 5
    assert lists(queries, values) == [[0, 0, 1, 1], [0]]
    assert columns.reshape(4, 5)[:2].tolist() == [[0, 1, 2, -1, -1], [-1, -1, -1, 3, 4]]


@pytest.mark.parametrize(
    ("before", "after", "strength", "kept", "keys"),
    [
        (stage(4), stage(2), [3, 1, 2, 3], [0, 3], [0, 3]),
        (stage(4), stage(2), [1, 1, 1, 1], [0, 1], [0, 1]),
        (stage(6, 2), stage(4, 2), [1, 3, 2, 9, 7, 8], [1, 2, 3, 5], [0, 1]),  # two of every group
        (stage(6, 3), stage(4, 2), [1, 9, 2, 3, 4, 5], [0, 1, 4, 5], [0, 2]),  # whole groups: sums of 10, 5, 9
        (stage(6, 3), stage(2, 1), [5, 5, 1, 9, 9, 1], [0, 1], [0]),
        # Many equal ones go in their order, as sorts of few happen to.
        (stage(40), stage(20), [1, 0, 1, 1] * 10, [i for i in range(40) if i % 4 != 1][:20], None),
        (stage(80, 40), stage(40, 20), [1, 0, 1, 1] * 20, [*range(2, 80, 4), *range(3, 80, 4)], [*range(1, 40, 2)]),
        (stage(80, 40), stage(40, 20), [1] * 80, [*range(40)], [*range(20)]),
        (stage(80, 2), stage(40, 2), [1] * 80, [*range(20), *range(40, 60)], [0, 1]),
    ],
)
def test_the_strongest_heads_stay_in_their_order(before, after, strength, kept, keys):
    assert lists(*map_strongest_heads(before, after, np.array(strength, float))) == [sorted(kept), keys or sorted(kept)]


def test_a_head_is_as_strong_as_what_it_writes():
    output = np.array([[3.0, 0.0, 1.0, 1.0], [0.0, 4.0, 1.0, 1.0]])  # width 2, two heads of 2
    assert head_strength(output, 2).tolist() == [5.0, 2.0]


def test_the_strongest_units_by_the_product_of_their_norms():
    outgoing = np.array([[3.0, 1.0, 0.0], [4.0, 0.0, 2.0]])  # norms 5, 1, 2
    up = np.array([[1.0, 0.0], [6.0, 8.0], [0.0, 4.0]])  # 1, 10, 4
    assert strongest_units([up], outgoing, 2).tolist() == [1, 2]  # 5, 10, 8
    gate = np.array([[9.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert strongest_units([up, gate], outgoing, 2).tolist() == [0, 1]  # 45, 10, 8
    assert strongest_units([], outgoing, 1).tolist() == [0]
    assert strongest_units([up], outgoing * [10, 1, 1], 1).tolist() == [0]  # 50, 10, 8
    assert strongest_units([], np.ones((2, 40)), 20).tolist() == list(range(20))
    assert widen(2, 4).tolist() == [0, 1, -1, -1]


def test_what_steps_say_of_heads_and_units():
    split = change_heads(stage(2, 1), stage(4, 1), "split")
    assert (split.name, split.exactness) == ("split-heads", "exact") and "the 1 key/value heads stay" in split.says
    added = change_heads(stage(2), stage(4))
    assert (added.name, added.exactness) == ("add-heads", "exact") and "2 heads of 4" in added.says
    assert "key/value" not in added.says + change_heads(stage(2), stage(4), "split").says
    assert "the 2 key/value heads stay" in change_heads(stage(4, 2), stage(6, 2)).says
    assert added.settings == {"before": 2, "after": 4, "head_dim": 4, "kv_heads": 4}
    trimmed = [change_heads(stage(4), stage(2), **more).says for more in ({}, {"calibrated": True}, {"by": "named"})]
    assert change_heads(stage(4), stage(2), "split").name == "trim-heads"
    assert len(set(trimmed)) == 3 and all("2 heads" in says for says in trimmed) and trimmed[2].endswith("named")
    narrow, wide = change_units(6, 4), change_units(4, 6)
    assert (narrow.name, narrow.exactness, wide.name, wide.exactness) == ("trim-mlp", "near", "widen-mlp", "exact")
    assert "4 of 6" in narrow.says and "add 2 " in wide.says and narrow.says != change_units(6, 4, calibrated=True).says


def test_what_steps_say_of_heads_of_another_size(monkeypatch):
    monkeypatch.setattr(operators.canonical, "splittable", lambda source: None)
    monkeypatch.setattr(operators.canonical, "rotary", lambda source: False)
    source = SimpleNamespace(learned=True, specs=(), weights=SimpleNamespace(entries={}))

    def resized(size: int, calibrated: bool = True) -> Step:
        after = stage(4, head_dim=size)
        return operators.resize_heads(source, stage(2), after, "transfer", Method(uncalibrated=True), calibrated)

    larger, same, smaller, blind = resized(8), resized(4), resized(2), resized(2, False)
    assert [step.exactness for step in (larger, same, smaller)] == ["exact", "exact", "near"]
    assert smaller.settings == {"before": [2, 4], "after": [4, 2], "calibrated": True}
    assert blind.says != smaller.says and "2 heads of 4 become 4 of 2" in smaller.says


def test_heads_have_at_most_as_many_children_as_entries():
    assert change_heads(stage(2, head_dim=2), stage(4, head_dim=2), "split").name == "split-heads"
    with pytest.raises(UsageError, match=r"\b2\b.*\b3 children"):
        change_heads(stage(2, head_dim=2), stage(6, head_dim=2), "split")
    with pytest.raises(UsageError, match=r"\b4 heads\b.*\b6\b.*\b4, 8\b"):
        change_heads(stage(4), stage(6), "split")


TWO = Shape((stage(4, depth=4), stage(4, depth=6)))


def test_layers_are_kept_as_they_are_named():
    cut = Shape((stage(4, depth=2), stage(4, depth=4)))
    named = drop_layers.without_data(TWO, cut, Method(keep="0,1,4,5,8,9"), period=2)
    assert (named.kept, named.criterion) == ((0, 1, 4, 5, 8, 9), "as listed")
    with pytest.raises(UsageError, match=r"\b2\b"):
        drop_layers.without_data(TWO, TWO, Method(keep="0,1,4,6"), period=2)
    alone = Shape((stage(4, depth=4),))
    half = Shape((stage(4, depth=2),))
    assert drop_layers.without_data(alone, half, Method(keep="2,3"), period=2).kept == (2, 3)
    after = Shape((stage(4, depth=2), stage(4, depth=3)))
    spaced = [drop_layers.without_data(TWO, after, Method(layers=name)) for name in ("auto", "first-of-each")]
    assert [choice.kept for choice in spaced] == [(0, 3, 4, 6, 9), (0, 2, 4, 6, 8)]
    assert spaced[0].criterion != spaced[1].criterion


def test_named_layers_are_counted_by_stage():
    assert drop_layers.with_kept(TWO, RequestedShape(), Method(keep="0,3,4,9")).layers == "2,2"
    assert drop_layers.with_kept(TWO, RequestedShape(layers="2,2"), Method(keep="0,3,4,9")).layers == "2,2"
    assert drop_layers.with_kept(TWO, RequestedShape(layers="3"), Method()).layers == "3"
    for keep, layers, says in (
        ("0,10", None, r"\b0 to 9\b"),
        ("0,1", None, r"stage 2\b"),
        ("4,5", None, r"stage 1\b"),
        ("0,4", "1,2", r"\b1, 1 layers, not 1,2\b"),
    ):
        with pytest.raises(UsageError, match=says):
            drop_layers.with_kept(TWO, RequestedShape(layers=layers), Method(keep=keep))


def test_first_layers_stay_where_others_tell_them_by_their_number():
    source = SimpleNamespace(architecture=SimpleNamespace(stay=(2, 1), stay_last=(), name="family"), shape=TWO)
    assert drop_layers.explain_tied_start(source, (0, 1, 4, 7)) is None
    assert "Layer 1 " in drop_layers.explain_tied_start(source, (0, 2, 4))
    assert "Layer 4 " in drop_layers.explain_tied_start(source, (0, 1, 5))
    assert "Layer 4 " in drop_layers.explain_misplaced(source, (0, 1, 5))


def test_layers_that_could_stay_instead(monkeypatch):
    """As many of each stage, of which the first ones that have to stay, then the last of those that were named."""
    source = SimpleNamespace(architecture=SimpleNamespace(stay=(2, 1), stay_last=(), name="family"), shape=TWO)
    monkeypatch.setattr(drop_layers, "explain_misplaced", drop_layers.explain_tied_start)
    assert drop_layers.keep_in_place(source, (0, 2, 3, 5, 7)) == [0, 1, 3, 4, 7]
    assert drop_layers.keep_in_place(source, (1, 3, 4)) == [0, 1, 4]
    assert drop_layers.keep_in_place(source, (3, 5)) is None  # one layer is fewer than the two that stay
    for kept, advised in (((0, 2, 3, 5, 7), "--keep 0,1,3,4,7."), ((3, 5), "stay.")):
        drop_layers.refuse_misplaced(source, "fresh", kept)
        with pytest.raises(UsageError) as caught:
            drop_layers.refuse_misplaced(source, "transfer", kept)
        assert caught.value.hint.endswith(advised)
    drop_layers.refuse_misplaced(source, "transfer", (0, 1, 4))
    source.architecture.stay = ()
    assert drop_layers.keep_in_place(source, (1, 2, 5)) == [0, 2, 4]
