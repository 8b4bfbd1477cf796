"""The race of sets of layers: the winner of the whole contest, for less; and its bound by hand."""

from math import inf

import numpy as np
import pytest
import torch

from leansurgeon.checkpoints.source import open_source
from leansurgeon.measure.data.batches import in_pieces
from leansurgeon.surgery import score
from leansurgeon.surgery.calibrate import calibrate
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.score import Tally
from tests.support.methods import with_method
from tests.surgery.cuts import samples, train

NAME = {"gpt2": "n_layer"}


def chosen(folder, data, monkeypatch, layers, error):
    """Layers, candidates of the trial, passes."""
    monkeypatch.setattr(score, "ERROR", error)
    monkeypatch.setattr("leansurgeon.surgery.calibrate.TRIAL", {"fit": 1_024, "guard": 1_024})
    steps = plan(open_source(str(folder)), RequestedShape(layers=str(layers)), calibrated=True)
    for bound in ("CHOICE", "ALL"):  # all sets of layers compete, to the end if nothing leaves them out
        monkeypatch.setattr(f"leansurgeon.surgery.context.{bound}", inf)
    outcome = calibrate(with_method(steps), data)
    outcome.close()
    tried = [c for c in outcome.record.candidates if c.data == "part"]
    return outcome.record.layers, tried, outcome.record.passes


@pytest.mark.parametrize(
    "family, layers, seed",
    [
        ("vit", 6, 4),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("llama", 6, 1), ("gpt2", 5, 2), ("bert", 6, 3))),
    ],
)
def test_the_winner_is_that_of_the_whole_contest_for_less(family, layers, seed, tmp_path, monkeypatch):
    folder = train(family, tmp_path / "deep", 40, seed, **{NAME.get(family, "num_hidden_layers"): 8})
    data = samples(family, 12, 8, 2, seed + 2)
    raced, tried, passes = chosen(folder, data, monkeypatch, layers, score.ERROR)
    whole, all_tried, more = chosen(folder, data, monkeypatch, layers, 0.0)
    assert raced == whole and passes < more
    left = [c for c in tried if not c.left_out]
    assert 0 < len(left) < len(tried) == len(all_tried) and not any(c.left_out for c in all_tried)
    pieces = {c.score.pieces for c in all_tried}
    assert len(pieces) == 1 and min(c.score.pieces for c in tried) < pieces.pop()
    by_kept = {c.kept: c.score.judged_by for c in all_tried}
    best = min(by_kept.values())
    assert {k for k, v in by_kept.items() if v <= best * score.CLOSE} <= {c.kept for c in left}
    to_the_end = [c for c in tried if c.score.pieces == all_tried[0].score.pieces]
    assert all(c.score.judged_by == pytest.approx(by_kept[c.kept], rel=1e-5) for c in to_the_end)


def test_equals_are_left_out_as_seldom_as_is_said():
    """Candidates exactly CLOSE times as far as the best: the chance that one of them is left out is below ERROR."""
    draws = np.random.default_rng(0)
    wrong = 0
    for _ in range(200):
        best = draws.gamma(2.0, 0.2, 512)
        tallies = [Tally(divergences=[torch.from_numpy(best)], errors=[torch.from_numpy(best)])]
        for _ in range(8):
            worse = torch.from_numpy(score.CLOSE * best + 0.2 * draws.standard_normal(512))
            tallies.append(Tally(divergences=[worse], errors=[worse]))
        wrong += len(score.survivors(range(9), tallies, 9 * score.rounds(4))) < 9
    assert wrong <= 200 * score.ERROR
    assert [score.rounds(n) for n in (1, 2, 3, 4, 5, 8)] == [1, 1, 2, 2, 3, 3]


def test_pieces_hold_every_sample_once():
    ids = torch.arange(14).reshape(7, 2)
    pieces = in_pieces([{"input_ids": ids[:5]}, {"input_ids": ids[5:]}])
    assert len(pieces) == 4 and sorted(torch.cat([p["input_ids"] for p in pieces]).tolist()) == ids.tolist()
    odd = {"input_ids": ids[:5], "pixel_values": torch.zeros(9, 3)}  # rows that are not those of the samples
    assert in_pieces([odd]) == [odd]
