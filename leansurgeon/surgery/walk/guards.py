"""Cuts on few samples of the user's: what the model makes itself is mixed in until the guard on that is safe, too.

What a hundred odd lines say about a model is not what it does elsewhere, and a fit to them can be worse on all other
text than one to random tokens. So the cut is made on the samples that the model makes itself alone, which tells what
can be had there; then on the user's, and on the user's with more and more of the others, until the guard on the others
is within `SAFE` of that. Both guard in every cut, so nothing is kept that either speaks against.
"""

from __future__ import annotations

from dataclasses import replace

from leansurgeon.checkpoints.recorded.decided import MixedIn, Mixing
from leansurgeon.measure.data.batches import rows_of
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.measure.data.mixed import with_own
from leansurgeon.progress import Say, silent
from leansurgeon.surgery.plan.planning import Plan
from leansurgeon.surgery.walk import calibrated
from leansurgeon.surgery.walk.calibrated import Outcome
from leansurgeon.surgery.walk.ground import Options

SAFE = 1.05  # times what is off on own samples where they alone are fitted to
MORE, ROUNDS = 4, 4  # times as many own samples from round to round; the last takes all that there are


def calibrate_safely(
    plan: Plan, calibration: Calibration, options: Options, say: Say = silent
) -> tuple[Outcome, Calibration]:
    """The cut and the data that it was made on. Raises what `calibrate` raises."""
    if calibration.beside is None:
        return calibrated.calibrate(plan, calibration, options, say), calibration
    tried = amounts(sum(map(rows_of, calibration.fit)), sum(map(rows_of, calibration.beside.fit)))
    say(
        f"With so few samples of yours the cut is made {1 + len(tried)} times at most: on what the model makes, "
        "on yours, and on yours with more and more of the others."
    )
    outcome = cut(plan, with_own(calibration, None, alone=True), options, say, "own")
    outcome.close()
    spent = spent_by(outcome)
    reach, steps = own_score(outcome), []
    for number, rows in enumerate(tried):
        mix = with_own(calibration, rows)
        outcome = cut(plan, mix, options, say, f"mix-{rows}")
        spent += spent_by(outcome)
        off = own_score(outcome)
        steps.append(MixedIn(rows, off))
        safe = off <= SAFE * reach
        say(f"  {rows} own samples mixed in: off by {off:.4f} on such samples ({reach:.4f} where they alone count)")
        if safe or number == len(tried) - 1:
            break
        outcome.close()
    told = Mixing(reach, tuple(steps), safe)
    passes = round(spent / outcome.record.tokens, 2)  # of all cuts, over the samples of this one
    return replace(outcome, record=replace(outcome.record, passes=passes, mixing=told)), mix


def cut(plan: Plan, data: Calibration, options: Options, say: Say, name: str) -> Outcome:
    """One of the cuts, with steps of its own."""
    return calibrated.calibrate(plan, data, replace(options, kept=options.kept.inside(name)), say)


def spent_by(outcome: Outcome) -> float:
    """Tokens that a cut has taken through the source."""
    return outcome.record.passes * outcome.record.tokens


def own_score(outcome: Outcome) -> float:
    """How far the result is from the source on the guard of the model's own samples, which come last."""
    return outcome.record.healing.score.by_source[-1]


def amounts(given: int, most: int) -> list[int]:
    """Own samples to try: none, as many as are given, `MORE` times as many, and all in the last round.

    >>> amounts(100, 512), amounts(300, 512), amounts(5, 512)
    ([0, 100, 400, 512], [0, 300, 512], [0, 5, 20, 512])
    """
    tried = [0, *(given * MORE**i for i in range(ROUNDS - 2))]
    return [*(n for n in tried if n < most), most]
