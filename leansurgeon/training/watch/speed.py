"""How fast a training is, and how long it will take."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from leansurgeon.tasks import Task
from leansurgeon.training.state import Run

_LANGUAGE = ("causal-lm", "masked-lm")


def tokens_in(task: Task, batch: dict[str, Any]) -> int:
    """Tokens of one sample where the task counts in tokens, else 1."""
    return batch["input_ids"].shape[1] if task.head in _LANGUAGE else 1


def rate(run: Run, done: int, steps: int, seconds: float) -> tuple[float, str]:
    """Samples or tokens per second over the last `steps` of `done` steps, which took `seconds`."""
    unit = "tokens/s" if run.task.head in _LANGUAGE else "samples/s"
    samples = run.plan.position(done) - run.plan.position(done - steps)
    return samples * run.tokens_per_sample / max(seconds, 1e-9), unit


def median_step(windows: Sequence[tuple[float, float]]) -> float:
    """The median over all steps of the seconds that one took, from windows of so many steps in so many seconds."""
    ordered = sorted((spent / steps, int(steps)) for steps, spent in windows)
    ends = list(accumulate(steps for _, steps in ordered))
    middle = ((ends[-1] - 1) // 2, ends[-1] // 2)
    return statistics.fmean(ordered[bisect_right(ends, step)][0] for step in middle)


def mfu(run: Run, speed: float) -> float | None:
    """The share of what the devices of all processes can do at most that goes into the model, at `speed` (samples or
    tokens per second, as `rate` has it); None where either is not known.
    """
    if not run.peak_flops or not run.flops_per_sample:
        return None
    return speed / run.tokens_per_sample * run.flops_per_sample / run.peak_flops / run.plan.processes


def eta(run: Run, done: int) -> float:
    """Seconds left, evaluations included, from what steps and evaluations took so far."""
    if run.plan.timed:
        return (1 - run.trainer.pace.fraction(done)) * run.plan.seconds
    steps, spent = (sum(column) for column in zip(*run.history.windows, strict=True))
    left = (run.plan.steps - done) * spent / steps
    if run.history.eval_seconds:
        left += run.plan.evaluations_left(done) * statistics.fmean(run.history.eval_seconds)
    return left
