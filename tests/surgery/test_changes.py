"""What a cut changes at which layer, and what it then takes: counted by hand, with 100 tokens to fit, 10 to guard and 5
of them in the first batch.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from leansurgeon.shape import Shape, Stage
from leansurgeon.surgery import budget, candidates
from leansurgeon.surgery.budget import Effort
from leansurgeon.surgery.candidates import Candidate

SIX = Shape((Stage(6, 4, 8, 4, 48, 32),))
TWO = Shape((Stage(3, 4, 8, 4, 48, 32), Stage(4, 2, 8, 2, 48, 32)))
REFIT = 2 * 5 + 100 + 2 * 10  # of a projection: two looks at the first batch, the sums, and the guard before and after
TRIM = 2 * 5 + 100 + 10


def plan(before: Shape = SIX, after: Shape | None = None, init: str = "transfer", **numbers: int) -> SimpleNamespace:
    return SimpleNamespace(before=before, after=(after or before).with_(**numbers), init=init)


def effort(**healing) -> Effort:
    return Effort(100.0, 10.0, 5.0, **healing)


def way(*kept: int, **more) -> Candidate:
    return Candidate(kept, "as listed", **more)


def test_a_kept_layer_stands_for_those_up_to_the_next():
    def found(kept: tuple[int, ...], shape: Shape) -> tuple[list[int], list[int]]:
        """The last source layer that each stands for, and those behind a gap."""
        layers = candidates.course(kept, plan(shape))
        return [new.until for new in layers], [new.kept for new in layers if new.gap]

    assert found((0, 1, 4, 5), SIX) == ([0, 3, 4, 5], []) and found((2,), SIX) == ([5], [2])
    assert found((0, 3, 5), TWO) == ([2, 4, 6], []) and found((3, 4), TWO) == ([3, 6], [])
    assert found((0, 4), SIX)[1] == [] and found((1, 4), SIX)[1] == [1]
    assert found((0, 4, 5), TWO)[1] == [4] and found((2, 3), TWO)[1] == [2]


def test_layers_change_with_their_own_stage():
    after = Shape((TWO.stages[0], Stage(4, 4, 4, 4, 48, 32)))
    assert [candidates.is_near(plan(TWO, after), layer) for layer in (2, 3)] == [False, True]
    assert candidates.divides_heads(plan(TWO, after), 3) and not candidates.divides_heads(plan(TWO, after), 2)
    assert not candidates.divides_heads(plan(TWO, after, "naive"), 3)
    nears = [candidates.is_near(plan(**numbers), 0) for numbers in ({"heads": 2, "kv_heads": 2}, {"mlp_dim": 24})]
    assert nears == [True, True] and not candidates.is_near(plan(heads=8, mlp_dim=96), 0)


@pytest.mark.parametrize(
    ("candidate", "healing", "share", "blocks"),
    [
        (way(0, 1, 4, 5), effort(), 1.0, REFIT + 10 + 10),  # behind the cut the guard alone goes on
        (way(0, 1, 4, 5), effort(), 0.5, REFIT + 5 + 5),
        (way(0, 1, 4, 5, attention=True), effort(), 1.0, 2 * REFIT + 20),
        (way(0, 1, 4, 5, attention=True), effort(attentions=2), 1.0, 3 * REFIT + 20),
        (way(0, 1, 4, 5, later=True), effort(), 1.0, REFIT + 100 + REFIT + 100 + REFIT),
        (way(0, 1, 4, 5, attention=True, later=True), effort(), 1.0, 2 * REFIT + 100 + REFIT + 100 + REFIT),
        (way(0, 1, 4, 5), effort(pre_norm=False), 1.0, REFIT + 2 * 5 + 20),
        (way(0, 1, 4, 5), effort(heals=False), 1.0, 10 + 20),
        (way(0, 2, 3, 4, 5), effort(), 1.0, REFIT + 4 * 10),
        (way(1, 2, 3, 4, 5), effort(), 1.0, REFIT + 4 * 10),  # nothing before the gap
        (way(0, 1, 2, 4), effort(), 1.0, REFIT + 100 + REFIT),
        (way(0, 1, 2, 3, 4, 5), effort(), 1.0, 0.0),
    ],
)
def test_a_set_of_layers_takes_what_its_cuts_take(candidate, healing, share, blocks):
    assert budget.cost(plan(), candidate, healing, share) == blocks
    assert budget.cost(plan(), candidate, healing) == budget.cost(plan(), candidate, healing, 1.0)


def test_layers_made_anew_take_their_trims():
    every = way(0, 1, 2, 3, 4, 5)
    narrow = plan(mlp_dim=24)
    assert budget.cost(narrow, every, effort()) == 6 * (REFIT + TRIM) + 5 * 100
    assert budget.cost(narrow, every, effort(heals=False)) == 6 * (10 + TRIM) + 5 * 100
    # Behind a post-norm only cuts are refitted.
    assert budget.cost(narrow, every, effort(pre_norm=False)) == 6 * (10 + TRIM) + 5 * 100
    # A first stage that is narrower is no cut, so nothing later is refitted for it; its answer goes through the rest.
    first = plan(TWO, Shape((Stage(3, 4, 8, 4, 24, 32), TWO.stages[1])))
    whole = 3 * (REFIT + TRIM + 100) + 3 * (100 + 10) + 10
    assert budget.cost(first, way(0, 1, 2, 3, 4, 5, 6, later=True), effort()) == whole
    both = plan(mlp_dim=24, heads=2, kv_heads=2)
    assert budget.cost_of_rebuild(both, 0, 100, TRIM) == 2 * TRIM and budget.cost_of_rebuild(plan(), 0, 100, TRIM) == 0
    assert budget.cost_of_rebuild(plan(heads=8, head_dim=4, mlp_dim=24), 0, 100, TRIM) == TRIM + 100
    assert budget.cost_of_rebuild(plan(heads=2, head_dim=8, kv_heads=2), 0, 100, TRIM) == TRIM


def test_pieces_are_begun_while_there_is_room():
    assert budget.fitting([3, 4, 9, 1], 8.5) == [0, 1, 3] and budget.fitting([3, 4, 9, 1], 8) == [0, 1, 3]
    assert budget.fitting([9, 1], 5) == [0]  # there is a result in any case
    assert budget.fitting([4, 4], 8) == [0, 1] and budget.fitting([], 8) == []
