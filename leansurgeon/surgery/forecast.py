"""What a calibrated cut will take here: its work as the bounds count it, over what one block has shown.

Block-tokens: one token through one block; a training step is three.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from time import perf_counter

from leansurgeon.checkpoints.blockwise.stream import Stream
from leansurgeon.surgery.budget import TRIAL
from leansurgeon.surgery.candidates import Candidate, marks
from leansurgeon.surgery.choose_layers import BLOCKS
from leansurgeon.surgery.context import PARTS, CalibrationContext, SampleView
from leansurgeon.surgery.local_fit import STEP_TOKENS
from leansurgeon.surgery.spans import PASSES, block_steps

MORE_SETS = 3  # sets of layers beside the blocks of neighbours
WAYS = 3  # candidates on all of the data: two ways of healing and another finalist
RACED = 0.5  # of the guard of the trial, which a set of layers is judged on before it is left out
SOLVED = 1.5  # times the forward passes alone: sums and solutions of refits, weights on their way


@dataclass(frozen=True)
class CostForecast:
    """About how many passes of the source a cut will take, over how many tokens, and how long that is here."""

    passes: float
    tokens: int
    seconds: float

    def describe(self, name: str) -> str:
        """One line for a person.

        >>> CostForecast(5.4, 40_960, 251.0).describe("SmolLM2")
        'About 5 passes of SmolLM2 over 40,960 tokens: some 4 minutes here.'
        """
        number, unit = (self.seconds, "second") if self.seconds < 90 else (self.seconds / 60, "minute")
        long = f"some {max(1, round(number)):,} {unit}{'' if round(number) <= 1 else 's'} here"
        return f"About {max(1, round(self.passes))} passes of {name} over {self.tokens:,} tokens: {long}."


def forecast_cost(context: CalibrationContext) -> CostForecast:
    """What the cut will take if all that it tries gains, within its bounds; the time by one block on one real batch."""
    plan, method, whole = context.plan, context.method, context.samples
    lost = plan.before.depth - plan.after.depth
    ways = zip(plan.before.spans, plan.after.spans, strict=True)  # of every stage neighbours in the middle go
    kept = tuple(i for a, b in ways for i in (*a[: (len(b) + 1) // 2], *a[len(a) - len(b) // 2 :]))
    first, tokens = Candidate(method.kept or kept, ""), context.one_pass
    if lost and method.keep is None:
        part = SampleView.of(context.calibration, TRIAL).batches
        looked = {name: context.tokens(part[name]) for name in PARTS}
        sets = min(BLOCKS, plan.after.depth) + MORE_SETS
        tokens += plan.before.depth * (looked["fit"] + 2 * looked["guard"]) + sets * context.cost(first, part, RACED)
        tokens += (WAYS - 1) * context.cost(first, whole)
    tokens = min(tokens + context.cost(first, whole), context.most_closed)
    rate = time_block(context) / SOLVED
    if method.grows:
        spans = marks(first.kept, plan)
        steps = block_steps(spans, max(1, round(context.tokens(whole["fit"]) / STEP_TOKENS)))
        grown = min(3.0 * STEP_TOKENS * steps, PASSES * context.one_pass, context.most - tokens)
        tokens += grown if method.heal_time is None else min(grown, method.heal_time * rate)
    seen = round(context.one_pass / plan.before.depth)
    return CostForecast(tokens / context.one_pass, seen, tokens / rate)


def time_block(context: CalibrationContext) -> float:
    """Block-tokens a second, by the first block on the first batch to fit, the better of two runs behind a first."""
    stream, took = Stream(context.teacher, context.calibration.fit[:1]), inf
    context.fill(0)
    stream.run()
    for _ in range(2):
        start = perf_counter()
        float(stream.run()[0].sum())  # a GPU has finished it then
        took = min(took, perf_counter() - start)
    context.teacher.empty(0)
    hidden = stream.hidden[0]
    return hidden.numel() / hidden.shape[-1] / took
