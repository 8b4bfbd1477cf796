"""Fit a span of neighbouring blocks to the source's hidden states behind it: the growing local fit. Imports torch.

Where layers went, the block before the cut and the first one behind it are trained together to give what the source has
behind them; then the span grows by kept blocks as long as guard samples gain. No labels, no head, no backward pass
through the model: memory is that of the span. The loss counts every token by its relative error (`mean_error`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from leansurgeon.measure.costs.precision import NARROW, has_bf16
from leansurgeon.surgery.refit.local_fit import Clock, Example, Fitted, fit_examples

STEP_TOKENS = 1_024  # real or not; an image's patches count as they come
LEAST_GAIN = 0.02  # of the guard's error; below it the span grows no further
GENTLER = 0.25  # of the rate, once, where the guard did not gain at all
EPOCHS = 8  # times that a sample is seen in one phase at most


@dataclass(frozen=True)
class Phase:
    """One round of fitting: Adam's steps and peak rate."""

    steps: int
    rate: float


# Measured on SmolLM2-135M at 24 of 30 layers; the first fits two blocks, each later one two more.
PHASES = (Phase(240, 7e-4), Phase(160, 5e-4), Phase(96, 4e-4), Phase(64, 4e-4))


def fit_span(
    forward: Callable[..., Tensor],
    parameters: Sequence[Tensor],
    fit: Sequence[Example],
    guard: Sequence[Example],
    phase: Phase,
    clock: Clock | None = None,
    device: str = "cpu",
    most: Callable[[int], int] = lambda steps: steps,
) -> Fitted:
    """Fit in place, by products on a kind of `device`; the parameters are put back where the guard does not gain, after
    a second try at a gentler rate. `most` says before each try how many of so many steps may be taken; the first takes
    one at least.
    """
    wanted = max(1, min(phase.steps, EPOCHS * len(fit)))
    steps = max(1, most(wanted))
    cast = products(fit[0].hidden.shape[-1], device)
    done = fit_examples(forward, parameters, fit, guard, steps=steps, rate=phase.rate, clock=clock, cast=cast)
    over = done.kept or (clock is not None and clock.gone >= 1)
    if over or not (steps := most(wanted)):
        return done
    return fit_examples(forward, parameters, fit, guard, steps=steps, rate=GENTLER * phase.rate, clock=clock, cast=cast)


def products(width: int, device: str) -> Callable[[], AbstractContextManager]:
    """In which numbers products are taken: bf16 with fp32 sums where the hardware has such products and hidden states
    are wide enough to gain by them.
    """
    if width < NARROW or not has_bf16(device):
        return nullcontext
    return lambda: torch.autocast(device, torch.bfloat16)
