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
from leansurgeon.surgery.local_fit import PHASES, STEP_TOKENS, Example, Phase, TimeLimit, fit_span
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.shrink import decide
from leansurgeon.surgery.spans import PASSES, share_of_steps
from tests.support.methods import with_method
from tests.surgery.cuts import cut_with_data, error


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.families) for name in ("bert", "gpt2", "vit"))]
)
def test_the_local_fit_gains_on_held_out_data(family, trained, tmp_path, monkeypatch):
    monkeypatch.setattr("leansurgeon.surgery.spans.PASSES", 6.0)  # on so few tokens five leave a llama at 0.81
    folder, data = trained(family)
    closed, _ = cut_with_data(tmp_path, (folder, data), {"layers": "3"}, "closed", keep=(0, 1, 3))
    local, outcome = cut_with_data(tmp_path, (folder, data), {"layers": "3"}, "local", keep=(0, 1, 3), heal="local")
    assert error(local, folder, data) < 0.8 * error(closed, folder, data)
    found = outcome.record.healing.local
    assert found.kept and found.after < found.before and outcome.record.healing.score.judged_by == found.after
    (at,) = found.cuts
    assert at.first == 1 and [span.until for span in at.spans] == [2]
    touched = {re.search(r"(?:layer|layers|h)\.(\d)", name)[1] for name in outcome.edits}
    assert touched == {"1", "2"}  # the layer before the cut and the one behind it


def test_no_time_leaves_the_closed_form_to_the_bit(trained):
    folder, data = trained("gpt2")
    steps = plan(open_source(str(folder)), RequestedShape(layers="3"), calibrated=True)
    edits, chosen = {}, {}
    for heal, seconds in (("closed", None), ("local", 0.0)):
        outcome = calibrate(with_method(steps, heal, (0, 1, 3), heal_time=seconds), data)
        chosen[heal] = outcome.record.healing
        edits[heal] = {name: np.array(values) for name, values in outcome.edits.items()}
        outcome.close()
    (span,) = chosen["local"].local.cuts[0].spans
    assert (span.fit.steps, span.fit.kept, chosen["local"].local.kept) == (0, False, False)
    if (chosen["closed"].later, chosen["closed"].attention) == (False, chosen["local"].attention):
        assert edits["closed"].keys() == edits["local"].keys() != set()
        assert all(np.array_equal(edits["closed"][name], edits["local"][name]) for name in edits["closed"])


def test_a_decided_plan_heals_locally_by_default_and_says_so(trained):
    folder, data = trained("vit")
    decided = decide(plan(open_source(str(folder)), RequestedShape(layers="3"), calibrated=True), data)
    assert decided.record.healing.local
    assert [o.name for o in decided.plan.operators] == ["drop-layers", "heal", "fit-locally"]
    decided.close()


def test_blocks_of_two_stages_are_tried_stage_by_stage():
    angle = {(i, 2): cost for i, cost in enumerate((0.1, 0.5, 0.3, 0.2))} | {(6, 1): 0.1, (7, 1): 0.9, (8, 1): 0.4}
    found = Evidence([0.0] * 9, angle, [Groups(range(5), 3), Groups(range(5, 9), 3)])
    tried = blocks(found)
    assert list(tried) == ["block 3-4", "block 6-6", "block 2-3", "block 8-8", "block 1-2", "block 7-7"]
    assert tried["block 2-3"] == (0, 1, 4, 5, 7, 8) and tried["block 8-8"] == (0, 1, 2, 5, 6, 7)
    assert list(blocks(found, most=3)) == list(tried)[:3]
    scores = dict.fromkeys(tried.values(), 0.6) | {tried["block 2-3"]: 0.4, tried["block 8-8"]: 0.3}
    spans = [groups.stage for groups in found.stages]
    assert combine_stages(spans, scores) == (0, 1, 4, 5, 6, 7)  # 2-3 and 8: the best of both, which nobody tried
    assert blocks(replace(found, stages=[Groups(range(5), 1), Groups(range(5, 9), 3)])) == {}


@pytest.mark.parametrize(
    ("kept", "before", "after", "spans"),
    [
        ((0, 1, 4, 5, 7, 8, 9), [10], [7], [(1, (2,)), (3, (4, 6)), (1, (6,))]),  # and both cuts together
        ((0, 1, 4, 5, *range(7, 14)), [14], [11], [(1, (2,)), (3, (4, 6, 8, 10))]),  # too many for one
        ((0, 3, 4, 5), [6], [4], [(0, (1, 3))]),
        ((0, 3, 4), [3, 2], [1, 2], [(0, (0,))]),  # the stage ends with the layer before the cut
        ((1, 2), [3], [2], [(0, (1,))]),  # leading layers went
    ],
)
def test_spans_end_before_the_next_cut_and_with_their_stage(kept, before, after, spans):
    shapes = [Shape(tuple(Stage(n, 2, 4, 2, 8, 8) for n in depths)) for depths in (before, after)]
    steps = type("Plan", (), dict(zip(("before", "after"), shapes, strict=True)))
    assert [(mark.first, mark.ends) for mark in marks(kept, steps)] == spans


def test_spans_grow_by_two_layers_while_phases_are_left():
    assert growing_ends(1, 5) == (2, 4, 5) and growing_ends(0, 20) == (1, 3, 5, 7) and growing_ends(3, 3) == (3,)


def test_spans_cost_so_many_passes_at_most():
    """Of a model of six blocks, on 40 pieces to fit and as many tokens to guard."""
    spans = [CutMark(1, (2, 4), PHASES), CutMark(1, (5,), PHASES[:1])]
    steps = 2 * PHASES[0].steps + 4 * PHASES[1].steps + 5 * PHASES[0].steps
    tokens = 40 * STEP_TOKENS
    assert share_of_steps(spans, 60, tokens, tokens, 40) == 1.0
    share = share_of_steps(spans, 6, tokens, tokens, 40)
    assert share * steps * 3 * STEP_TOKENS == pytest.approx(PASSES * 6 * 2 * tokens) and 0 < share < 1


def test_a_short_stage_whose_heads_were_divided_is_one_span(trained):
    folder, data = trained("bert")
    steps = plan(open_source(str(folder)), RequestedShape(heads="8", head_dim="split"), calibrated=True)
    assert [o.name for o in steps.operators] == ["split-heads", "heal", "fit-locally"]
    outcome = calibrate(with_method(steps, "local"), data)
    outcome.close()
    found = outcome.record.healing.local
    assert [(cut.first, [span.until for span in cut.spans]) for cut in found.cuts] == [(0, [1, 3])]
    assert found.kept and found.after < found.before


def test_fewer_spans_decide_between_close_candidates():
    costs = [(False, spans) for spans in range(4)]
    assert best_of([0.40, 0.41, 0.43], [costs[3], costs[1], costs[0]]) == 1
    assert best_of([0.40, 0.40], [costs[1]] * 2) == 0 and best_of([0.5, 0.4], [costs[1], costs[3]]) == 1
    # A pattern that other programs count by is worth no more than noise.
    assert best_of([0.400, 0.410], [(True, 1), (False, 3)]) == 1
    assert best_of([0.400, 0.440], [(True, 1), (False, 3)]) == 0


def test_a_span_that_does_not_gain_is_put_back_after_a_gentler_try():
    weight, truth = torch.eye(8), torch.randn(8, 8, generator=torch.Generator().manual_seed(9))
    draws = (torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    fit, guard = (Example(x, x @ truth) for x in draws)
    tries = []

    def forward(hidden):
        tries.append(hidden)
        return hidden @ weight

    def try_phase(phase, *clock):
        tries.clear()
        return fit_span(forward, [weight], [fit] * 20, [guard], phase, *clock)

    assert try_phase(Phase(160, 0.05), TimeLimit(0.0)).steps == 0 and torch.equal(weight, torch.eye(8))
    good = try_phase(Phase(160, 0.05))
    assert good.kept and good.guard_after < 0.2 * good.guard_before
    kept = weight.clone()
    assert not try_phase(Phase(4, 1e6)).kept and torch.equal(weight, kept)
    assert len(tries) == 2 * (4 + 2)  # steps, and the guard before and after, twice


def test_words_for_healing():
    with pytest.raises(UsageError, match="none, closed, local"):
        Method(heal="closd").check(True)
    with pytest.raises(UsageError, match="--heal-time"):
        Method(heal="closed", heal_time=60.0).check(True)
