"""The growing local fit: what it gains on samples it has not seen, when it stops, and what it leaves alone."""

import re

import pytest
import torch

from leansurgeon.checkpoints.source import open_source
from leansurgeon.shape import Shape, Stage
from leansurgeon.surgery.calibrate import best_of, calibrate
from leansurgeon.surgery.candidates import CutMark, marks
from leansurgeon.surgery.choose_layers import combine_stages
from leansurgeon.surgery.local_fit import PHASES, STEP_TOKENS, Example, Phase, TimeLimit, fit_span
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
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
    assert error(local, folder, data) < 0.87 * error(closed, folder, data)
    found = outcome.record.healing.local
    assert found.kept and found.after < found.before and outcome.record.healing.score.judged_by == found.after
    (at,) = found.cuts
    assert at.first == 1 and [span.until for span in at.spans] == [2]
    touched = {re.search(r"(?:layer|layers|h)\.(\d)", name)[1] for name in outcome.edits}
    assert touched == {"1", "2"}  # the layer before the cut and the one behind it


def test_no_time_leaves_the_closed_form(trained):
    folder, data = trained("gpt2")
    steps = plan(open_source(str(folder)), RequestedShape(layers="3"), calibrated=True)
    outcome = calibrate(with_method(steps, "local", (0, 1, 3), heal_time=0.0), data)
    outcome.close()
    found = outcome.record.healing.local
    (span,) = found.cuts[0].spans
    assert (span.fit.steps, span.fit.kept, found.kept) == (0, False, False)
    assert outcome.record.healing.score.judged_by == found.before


def test_the_best_blocks_of_two_stages_go_together():
    """Blocks are tried stage by stage: the best of both need not have been tried together."""
    tried = {(0, 1, 3, 4, 5): 0.4, (0, 2, 3, 4, 5): 0.6, (0, 2, 3, 4, 6): 0.3}
    assert combine_stages([range(3), range(3, 7)], tried) == (0, 1, 3, 4, 6)


@pytest.mark.parametrize(
    ("kept", "before", "after", "spans"),
    [
        ((0, 1, 4, 5, 7, 8, 9), [10], [7], [(1, (2,)), (3, (4, 6)), (1, (6,))]),  # and both cuts together
        ((0, 1, 4, 5, *range(7, 14)), [14], [11], [(1, (2,)), (3, (4, 6, 8, 10))]),  # too many for one
        ((0, 3, 4), [3, 2], [1, 2], [(0, (0,))]),  # the stage ends with the layer before the cut
        ((1, 2), [3], [2], [(0, (1,))]),  # leading layers went
    ],
)
def test_spans_end_before_the_next_cut_and_with_their_stage(kept, before, after, spans):
    shapes = [Shape(tuple(Stage(n, 2, 4, 2, 8, 8) for n in depths)) for depths in (before, after)]
    steps = type("Plan", (), dict(zip(("before", "after"), shapes, strict=True)))
    assert [(mark.first, mark.ends) for mark in marks(kept, steps)] == spans


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
