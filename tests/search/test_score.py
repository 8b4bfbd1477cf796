"""Orders, fronts, the schedule of halving and the cheap numbers: closed forms and other implementations."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import ceil, log2

import numpy as np
import pytest

from leansurgeon.checkpoints.source import open_source
from leansurgeon.intervals import binomial_variance
from leansurgeon.search.cheap import CheapScores, gaussian_kappa, keep_most_influential, old_heads, order, scores
from leansurgeon.search.evidence import Evidence
from leansurgeon.search.halving import Result, Score, climb, schedule
from leansurgeon.search.space import Candidate
from leansurgeon.search.trainings import scale_length, shorten_training
from leansurgeon.shape import Shape
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.training.recipe.reading import load_training
from leansurgeon.training.recipe.schema import Train


@pytest.mark.parametrize("tries", [1, 2, 3, 5, 8, 13, 64])
def test_halving_in_closed_form(tries):
    rungs = schedule(tries)
    count = max(1, ceil(log2(tries))) if tries > 1 else 1
    assert [r.size for r in rungs] == [ceil(tries / 2**r) for r in range(count)]
    assert [r.share for r in rungs] == [Fraction(2**r, 2 ** (count - 1)) for r in range(count)]
    assert rungs[-1].size == min(tries, 2) and rungs[-1].share == 1
    if tries > 1 and log2(tries).is_integer():
        assert [r.size * r.share for r in rungs] == [2] * count


def candidates(count):
    shape = open_source("digits-vit").shape
    return [Candidate(RequestedShape(), shape.with_(mlp_dim=i + 1), i) for i in range(count)]


def test_halving_keeps_the_better_half_and_brings_in_what_stands_beside():
    seen = []
    *everyone, ninth = candidates(9)

    def attempt(rung, tried):
        seen.append((rung.share, [c.parameters for c in tried]))
        scores = {c.name: Result(Score(-abs(c.parameters - 3), "", True, False)) for c in tried}
        return {name: Result(None, "lost") if name == everyone[4].name else score for name, score in scores.items()}

    results = climb(everyone, attempt, beside=lambda survivors: [ninth, survivors[0]])
    # Of the first rung 2 and 4 are equal, but 4 is lost; 1 stands before 5.
    assert seen == [(Fraction(1, 4), [*range(8)]), (Fraction(1, 2), [3, 2, 1, 5]), (Fraction(1), [3, 2, 8])]
    assert len(results) == 3


def test_standard_error_of_a_share():
    assert binomial_variance(0.5, 100) == pytest.approx(0.05**2, rel=0.02)
    assert binomial_variance(1.0, 100) > 0


def test_kappa_of_gaussian_matrices_is_what_is_foretold():
    rng = np.random.default_rng(0)
    for tokens, inner in ((64, 256), (256, 64), (100, 150)):
        drawn = [np.linalg.cond(rng.standard_normal((tokens, inner))) for _ in range(20)]
        assert gaussian_kappa(tokens, inner) == pytest.approx(np.median(drawn), rel=0.15)
    square = [np.log(np.linalg.cond(rng.standard_normal((60, 60)))) for _ in range(200)]
    assert np.log(gaussian_kappa(60, 60)) == pytest.approx(np.mean(square), abs=0.2)


def evidence(**changes) -> Evidence:
    """Of the six layers of the digits ViT, whose samples have 17 tokens."""
    known = dict(tokens=17.0, kappa=[10.0, 20.0, 30.0, 40.0, None, 60.0], influence=[5.0, 1.0, 4.0, 1.0, 1.0, 9.0])
    return Evidence(**known | changes, says="")


def test_the_cheap_numbers_of_a_shape_by_hand():
    """Layers 0, 2 and 5 stay: 18 of 21 of the influence, and of their kappas 30 is the middle one. Twice the heads make
    a Gaussian's condition number (sqrt 128 + sqrt 17) / (sqrt 128 - sqrt 17) of (8 + sqrt 17) / (8 - sqrt 17).
    """
    source = open_source("digits-vit")  # width 64, 4 heads of 16
    lean = Candidate(
        RequestedShape(), source.shape.with_(depth=3, heads=8, kv_heads=8, mlp_dim=256), 123, more_heads=True
    )
    made = scores(source, [lean], evidence())[lean.name]
    assert made.parameters == 123
    assert made.influence == pytest.approx(18 / 21)
    root = 17**0.5
    ratio = (128**0.5 + root) / (128**0.5 - root) / ((8 + root) / (8 - root))
    assert made.kappa == pytest.approx(30 * ratio) and 0.6 < ratio < 0.8
    assert (made.memory, made.latency) == (None, None)
    assert scores(source, [lean], None) == {lean.name: CheapScores(123)}


def test_what_is_not_known_of_layers_is_left_out():
    source = open_source("digits-vit")
    lean = Candidate(RequestedShape(), source.shape.with_(depth=2), 1)

    def score(**changes) -> CheapScores:
        return scores(source, [lean], evidence(**changes))[lean.name]

    # The most influential layers are 4, whose kappa is unknown, and 5; without influence it is the first and the last.
    assert score(influence=[1.0, 1.0, 1.0, 1.0, 2.0, 2.0]).kappa == pytest.approx(60)
    assert score(influence=None).influence is score(influence=[0.0] * 6).influence is None
    assert score(influence=None).kappa == pytest.approx((10 + 60) / 2) and score(kappa=[None] * 6).kappa is None
    wider = Candidate(RequestedShape(), source.shape.with_(depth=2, heads=8, kv_heads=8), 1)
    assert scores(source, [wider], evidence(kappa=[1.1] * 6))[wider.name].kappa == 1  # no matrix has less


def test_stages_keep_their_own_most_influential_layers():
    stage = open_source("digits-vit").shape.stages[0]
    before, after = (Shape(tuple(replace(stage, depth=depth) for depth in depths)) for depths in ((3, 4), (2, 1)))
    assert keep_most_influential(before, after, [1, 2, 3, 9, 8, 7, 9]) == [1, 2, 3]  # of equals the first
    assert keep_most_influential(before, after, [3, 2, 3, 1, 1, 4, 1]) == [0, 2, 5]


def test_of_equal_ranks_the_smaller_one_stands_first_and_a_number_some_lack_does_not_count():
    one, two, three = trio = candidates(3)  # 0, 1 and 2 parameters, of which more is better
    assert order(trio, {c.name: CheapScores(c.parameters) for c in trio}) == [three, two, one]
    against = {c.name: CheapScores(c.parameters, kappa=c.parameters + 1.0) for c in trio}
    assert order([three, two, one], against) == [one, two, three]
    against[two.name] = CheapScores(1)
    assert order(trio, against) == [three, two, one]


def test_a_quarter_of_the_places_is_for_the_old_heads_and_none_of_one():
    assert [old_heads(tries) for tries in (1, 2, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


def test_a_training_is_shortened_as_a_whole():
    assert [scale_length(t, Fraction(1, 4)) for t in ("30ep", "600st", "3st", "24h")] == ["7.5ep", "150st", "1st", "6h"]
    full = load_training("imagenet-vit-b").train
    short = shorten_training(full, Fraction(1, 4))
    assert (short.duration, short.schedule.warmup) == ("75ep", "5ep")
    assert short.eval.every == "75ep" and not short.eval.at_start and short.optim == full.optim


def test_what_has_a_length_of_its_own_shrinks_with_the_training():
    train = Train(
        duration="600st", batch=64, optim={"lr": 1e-3}, schedule={"warmup": "40st"}, early_stopping={"patience": 2},
        batch_ramp={"start": 16, "until": "100st"}, checkpoint={"every": "9m", "keep_last": 3},
    )  # fmt: skip
    short = shorten_training(train, Fraction(1, 4))
    assert (short.duration, short.eval.every, short.schedule.warmup) == ("150st", "150st", "10st")
    assert (short.batch_ramp.start, short.batch_ramp.until) == (16, "25st") and short.early_stopping is None
    assert (short.checkpoint.every, short.checkpoint.keep_last, short.checkpoint.keep_best) == ("9m", 3, False)
    shares = Train(duration="3ep", batch=8, optim={"lr": 1e-3}, batch_ramp={"start": 2, "until": 0.5})
    short = shorten_training(shares, Fraction(1, 8))
    assert (short.duration, short.schedule.warmup, short.batch_ramp.until) == ("0.375ep", 0.0, 0.5)
