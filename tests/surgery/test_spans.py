"""The growing local fit: what it gains on samples it has not seen, when it stops, and what it leaves alone."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UsageError
from leansurgeon.shape import Groups, Shape, Stage
from leansurgeon.surgery.calibrate import best_of, calibrate
from leansurgeon.surgery.candidates import CutMark, growing_ends, marks
from leansurgeon.surgery.choose_layers import Evidence, blocks, combine_stages
from leansurgeon.surgery.context import CalibrationContext
from leansurgeon.surgery.local_fit import PHASES, STEP_TOKENS, Example, Phase, TimeLimit, fit_span, pace
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.score import CLOSE
from leansurgeon.surgery.shrink import decide
from leansurgeon.surgery.spans import PASSES, row_sizes, share_of_steps, split
from tests.support.methods import with_method
from tests.surgery.test_calibrate import cut, error, trained  # noqa: F401 (a fixture)


@pytest.mark.parametrize(
    "family", ["llama", "vit", *(pytest.param(name, marks=pytest.mark.families) for name in ("bert", "gpt2"))]
)
def test_the_local_fit_gains_on_held_out_data(family, trained, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr("leansurgeon.surgery.spans.PASSES", 6.0)  # on so few tokens five leave a llama at 0.81
    folder, data = trained(family)
    closed, _ = cut(tmp_path, (folder, data), {"layers": "3"}, "closed", keep=(0, 1, 3))
    local, outcome = cut(tmp_path, (folder, data), {"layers": "3"}, "local", keep=(0, 1, 3), heal="local")
    assert error(local, folder, data) < 0.8 * error(closed, folder, data)
    found = outcome.record.healing.local
    assert found.kept and found.after < found.before and outcome.record.healing.score.judged_by == found.after
    (at,) = found.cuts
    assert at.first == 1 and [span.until for span in at.spans] == [2]
    touched = {re.search(r"(?:layer|layers|h)\.(\d)", name)[1] for name in outcome.edits}
    assert touched == {"1", "2"}  # the layer before the cut and the one behind it


def test_no_time_leaves_the_closed_form_to_the_bit(trained):  # noqa: F811
    folder, data = trained("gpt2")
    steps = plan(open_source(str(folder)), RequestedShape(layers="3"), calibrated=True)
    found = {}
    for heal, seconds in (("closed", None), ("local", 0.0)):
        outcome = calibrate(with_method(steps, heal, (0, 1, 3), heal_time=seconds), data)
        chosen = outcome.record.healing
        found[heal] = {name: np.array(values) for name, values in outcome.edits.items()}, chosen
        outcome.close()
    spans = found["local"][1].local.cuts[0].spans
    assert [(span.fit.steps, span.fit.kept) for span in spans] == [(0, False)] and not found["local"][1].local.kept
    if found["closed"][1].later is False and found["closed"][1].attention == found["local"][1].attention:
        assert found["closed"][0].keys() == found["local"][0].keys()
        assert all(np.array_equal(found["closed"][0][name], found["local"][0][name]) for name in found["closed"][0])


def test_a_decided_plan_heals_locally_by_default_and_says_so(trained):  # noqa: F811
    folder, data = trained("vit")
    decided = decide(plan(open_source(str(folder)), RequestedShape(layers="3"), calibrated=True), data)
    assert decided.record.healing.local
    assert [o.name for o in decided.plan.operators] == ["drop-layers", "heal", "fit-locally"]
    decided.close()


def test_every_block_is_tried_after_its_refit(trained):  # noqa: F811
    folder, data = trained("gpt2")
    outcome = calibrate(with_method(plan(open_source(str(folder)), RequestedShape(layers="2"), calibrated=True)), data)
    tried = [c for c in outcome.record.candidates if c.data == "part"]
    assert {(0, 1), (0, 3)} <= {c.kept for c in tried}  # the blocks 2-3 and 1-2
    best = min(c.score.judged_by for c in tried if not c.left_out)
    assert outcome.record.layers in [c.kept for c in tried if c.score.judged_by <= CLOSE * best]
    outcome.close()


def test_blocks_are_ordered_by_angle_and_leave_the_first_layer():
    angle = {(i, 2): cost for i, cost in enumerate((0.1, 0.5, 0.3, 0.4, 0.2))}
    found = Evidence([0.0] * 6, angle, [Groups(range(6), 4)])
    assert list(blocks(found)) == ["block 4-5", "block 2-3", "block 3-4", "block 1-2"]
    assert blocks(found)["block 2-3"] == (0, 1, 4, 5) and len(blocks(found, most=2)) == 2


def test_blocks_of_two_stages_are_tried_stage_by_stage():
    angle = {(i, 2): cost for i, cost in enumerate((0.1, 0.5, 0.3, 0.2))} | {(6, 1): 0.1, (7, 1): 0.9, (8, 1): 0.4}
    found = Evidence([0.0] * 9, angle, [Groups(range(5), 3), Groups(range(5, 9), 3)])
    tried = blocks(found)
    assert list(tried) == ["block 3-4", "block 6-6", "block 2-3", "block 8-8", "block 1-2", "block 7-7"]
    assert tried["block 2-3"] == (0, 1, 4, 5, 7, 8) and tried["block 8-8"] == (0, 1, 2, 5, 6, 7)
    assert list(blocks(found, most=3)) == list(tried)[:3]
    scores = dict(zip(tried.values(), (0.5, 0.5, 0.4, 0.3, 0.9, 0.6), strict=False))  # 3-4 and 6-6 are one set
    assert tried["block 3-4"] == tried["block 6-6"] and len(scores) == 5
    scores |= {tried["block 2-3"]: 0.4, tried["block 8-8"]: 0.3}
    spans = [groups.stage for groups in found.stages]
    assert combine_stages(spans, scores) == (0, 1, 4, 5, 6, 7)  # 2-3 and 8: the best of both, which nobody tried
    assert blocks(replace(found, stages=[Groups(range(5), 1), Groups(range(5, 9), 3)])) == {}


def plan_of(before, after):
    """A plan's shapes by the depths of their stages, which are all that marks ask for; heads stay."""
    shapes = [Shape(tuple(Stage(n, 2, 4, 2, 8, 8) for n in depths)) for depths in (before, after)]
    return type("Plan", (), dict(zip(("before", "after"), shapes, strict=True)))


def test_spans_end_before_the_next_cut_and_with_their_stage():
    found = marks((0, 1, 4, 5, 7, 8, 9), plan_of([10], [7]))
    assert [(m.first, m.ends) for m in found] == [(1, (2,)), (3, (4, 6)), (1, (6,))]  # and both cuts together
    found = marks((0, 1, 4, 5, *range(7, 14)), plan_of([14], [11]))
    assert [(m.first, m.ends) for m in found] == [(1, (2,)), (3, (4, 6, 8, 10))]  # too many for one
    found = marks((0, 3, 4, 5), plan_of([6], [4]))
    assert [(m.first, m.ends) for m in found] == [(0, (1, 3))]
    assert growing_ends(1, 5) == (2, 4, 5) and growing_ends(0, 20) == (1, 3, 5, 7) and growing_ends(3, 3) == (3,)
    found = marks((0, 3, 4), plan_of([3, 2], [1, 2]))  # the stage ends with the layer before the cut
    assert [(m.first, m.ends) for m in found] == [(0, (0,))]
    assert [m.first for m in marks((1, 2), plan_of([3], [2]))] == [0]  # leading layers went


def test_a_short_stage_whose_heads_were_divided_is_one_span(trained):  # noqa: F811
    folder, data = trained("bert")
    steps = plan(open_source(str(folder)), RequestedShape(heads="8", head_dim="split"), calibrated=True)
    assert [o.name for o in steps.operators] == ["split-heads", "heal", "fit-locally"]
    scores = {}
    for heal in ("closed", "local"):
        outcome = calibrate(with_method(steps, heal), data)
        scores[heal] = outcome.record.healing.score.judged_by
        outcome.close()
    (found,) = outcome.record.healing.local.cuts
    assert found.first == 0 and [span.until for span in found.spans] == [1, 3]
    assert outcome.record.healing.local.kept and scores["local"] < scores["closed"]


def test_fewer_spans_decide_between_close_candidates():
    costs = [(False, spans) for spans in range(4)]
    assert best_of([0.40, 0.41, 0.43], [costs[3], costs[1], costs[0]]) == 1
    assert best_of([0.40, 0.41], [costs[0]] * 2) == 0
    assert best_of([0.40, 0.40], [costs[1]] * 2) == 0 and best_of([0.5, 0.4], [costs[1], costs[3]]) == 1


def test_spans_cost_so_many_passes_at_most():
    whole = [CutMark(1, (2, 4), PHASES), CutMark(1, (5,), PHASES[:1])]
    steps = 2 * PHASES[0].steps + 4 * PHASES[1].steps + 5 * PHASES[0].steps
    tokens = 40 * STEP_TOKENS
    assert share_of_steps(whole, 60, tokens, tokens, 40) == 1.0
    share = share_of_steps(whole, 6, tokens, tokens, 40)
    assert share * steps * 3 * STEP_TOKENS == pytest.approx(PASSES * 6 * 2 * tokens) and 0 < share < 1
    few = share_of_steps(whole[:1], 6, 100, 0, 2)  # eight rounds of two steps of 50 tokens
    assert few == pytest.approx(PASSES * 6 * 100 / (3 * 50 * 16 * (2 + 4)))


def test_pieces_keep_rows_together():
    batch = {"input_ids": torch.zeros(5, 512, dtype=torch.long)}
    assert row_sizes(batch, torch.zeros(5, 512, 8)) == [2, 2, 1]
    assert row_sizes(batch, torch.zeros(40, 64, 8)) == [5]  # hidden states of windows are no rows of samples
    parts = split([torch.arange(5)[:, None], torch.arange(3)[:, None]], [[2, 2, 1], [3]])
    assert [p[:, 0].tolist() for p in parts] == [[0, 1], [2, 3], [4], [0, 1, 2]]


def test_the_pace_rises_and_falls_in_straight_lines():
    found = [pace(step, 100) for step in range(100)]
    assert found[0] == 0.1 and found[9] == found[10] == 1.0 and found[55] == pytest.approx(0.5)
    assert found[99] == pytest.approx(1 / 90)


def linear(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 6, 8, generator=generator)
    truth = torch.randn(8, 8, generator=torch.Generator().manual_seed(9))
    return Example(x, x @ truth)


def test_a_span_that_does_not_gain_is_put_back_after_a_gentler_try():
    weight = torch.eye(8)
    good = fit_span(lambda h: h @ weight, [weight], [linear(1)] * 20, [linear(2)], Phase(160, 0.05))
    assert good.kept and good.after < 0.2 * good.before
    kept = weight.clone()
    tries = []
    bad = fit_span(
        lambda h: tries.append(1) or h @ weight, [weight], [linear(1)] * 20, [linear(2)], Phase(4, 1e6), TimeLimit()
    )
    assert not bad.kept and torch.equal(weight, kept)
    assert len(tries) == 2 * (4 + 2)  # steps, and the guard before and after, twice


def test_the_clock_ends_fitting_early():
    weight = torch.eye(8)
    done = fit_span(lambda h: h @ weight, [weight], [linear(1)] * 20, [linear(2)], Phase(160, 0.05), TimeLimit(0.0))
    assert done.steps == 0 and torch.equal(weight, torch.eye(8))
    assert TimeLimit().part(0.5).seconds is None and TimeLimit(0.0).gone >= 1
    half = TimeLimit(100.0).part(0.5)
    assert 49 < half.seconds <= 50


def test_work_is_counted_in_passes_of_the_source(trained):  # noqa: F811
    """One pass through four blocks; of three new layers one is run for its reach, sums and errors."""
    folder, data = trained("vit")
    steps = plan(open_source(str(folder)), RequestedShape(layers="3"), calibrated=True)
    counted = []
    for heal in ("none", "closed", "local"):
        outcome = calibrate(with_method(steps, heal, (0, 1, 3)), data)
        counted.append(outcome.record.passes)
        outcome.close()
    assert 1 < counted[0] < 1.5 < counted[1] < 5
    (fitted,) = outcome.record.healing.local.cuts[0].spans
    batches = 24 + 6  # each one piece
    assert counted[2] > 1 + 3 * 2 * fitted.fit.steps / (4 * batches)


def test_words_for_healing():
    with pytest.raises(UsageError, match="none, closed, local"):
        Method(heal="closd").check(True)
    with pytest.raises(UsageError, match="--heal-time"):
        Method(heal="closed", heal_time=60.0).check(True)
    ways = [Method(heal=heal) for heal in ("none", "closed", "local")]
    assert [(way.refits, way.grows) for way in ways] == [(False, False), (True, False), (True, True)]


def test_ground_has_no_cuts_to_mark_where_all_layers_stay(trained):  # noqa: F811
    folder, data = trained("vit")
    outcome = calibrate(plan(open_source(str(folder)), RequestedShape(mlp_dim="24"), calibrated=True), data)
    assert outcome.record.healing.local is None
    outcome.close()
    assert CalibrationContext(plan(open_source(str(folder)), RequestedShape(mlp_dim="24"), calibrated=True), data).heals
