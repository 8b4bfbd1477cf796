"""Forecast the work and time of a calibrated cut on this machine: its bounded work divided by the measured speed of one
block.

Block-tokens: one token through one block; a training step counts three.
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

MORE_SETS = 3  # sets of layers besides the contiguous blocks
WAYS = 3  # candidates on all data: two ways of healing and another finalist
RACED = 0.5  # share of the trial's guard that a set of layers sees before it can be eliminated
SOLVED = 1.5  # factor over the forward passes alone: sums and solutions of refits, transfers of weights


@dataclass(frozen=True)
class CostForecast:
    """Approximate number of passes of the source, over how many tokens, and the time on this machine."""

    passes: float
    tokens: int
    seconds: float

    def describe(self, name: str) -> str:
        """Describe the forecast in one line.

        >>> CostForecast(5.4, 40_960, 251.0).describe("SmolLM2")
        'About 5 passes of SmolLM2 over 40,960 tokens: some 4 minutes here.'
        """
        number, unit = (self.seconds, "second") if self.seconds < 90 else (self.seconds / 60, "minute")
        long = f"some {max(1, round(number)):,} {unit}{'' if round(number) <= 1 else 's'} here"
        return f"About {max(1, round(self.passes))} passes of {name} over {self.tokens:,} tokens: {long}."


def forecast_cost(context: CalibrationContext) -> CostForecast:
    """Forecast the cost within its bounds if every attempt improves, at the speed of one block on a real batch."""
    plan, method, whole = context.plan, context.method, context.samples
    lost = plan.before.depth - plan.after.depth
    ways = zip(plan.before.spans, plan.after.spans, strict=True)  # drop adjacent layers in the middle of every stage
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
    """Return block-tokens per second of the first block on the first fit batch: best of two runs after a warm-up."""
    stream, took = Stream(context.teacher, context.calibration.fit[:1]), inf
    context.fill(0)
    stream.run()
    for _ in range(2):
        start = perf_counter()
        float(stream.run()[0].sum())  # waits until a GPU has finished
        took = min(took, perf_counter() - start)
    context.teacher.empty(0)
    hidden = stream.hidden[0]
    return hidden.numel() / hidden.shape[-1] / took
