"""Fit blocks to what they should give, without labels and without a backward pass through the model. Imports torch.

They get hidden states (of the network as it is already cut) and targets (what the teacher has at the same place),
and Adam lowers the error of their own output for a few steps, one batch at a time. Memory is that of the blocks. The
result stays only if samples that took no part in the fitting confirm it.

Where layers went, the block before the cut and the first one behind it are trained together to give what the source has
behind them; then the span grows by kept blocks as long as guard samples gain. The loss counts every token by its
relative error (`mean_error`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from leansurgeon.checkpoints.recorded.decided import Fit
from leansurgeon.measure.costs.precision import NARROW, has_bf16
from leansurgeon.progress import track

BETAS = (0.9, 0.98)
WARMUP = 10  # steps
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


@dataclass(frozen=True)
class TimeLimit:
    """How long fitting may take: `seconds` from `start` on; None: as long as it takes."""

    seconds: float | None = None
    start: float = field(default_factory=perf_counter)

    @property
    def gone(self) -> float:
        """The share of the time that has gone; 1 or more: it is over."""
        return 0.0 if self.seconds is None else (perf_counter() - self.start) / max(self.seconds, 1e-9)

    def part(self, share: float) -> TimeLimit:
        """A clock for so much of what is left."""
        return TimeLimit() if self.seconds is None else TimeLimit(share * max(0.0, self.seconds * (1 - self.gone)))


FOREVER = TimeLimit()


@dataclass(frozen=True)
class Example:
    """One batch: what enters the block `(B, T, width)`, what should come out, which tokens are real `(B, T)`, and other
    arguments of the block (masks, rotary tables).
    """

    hidden: Tensor
    target: Tensor
    mask: Tensor | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


def pace(step: int, steps: int) -> float:
    """Share of the peak rate: linear up over WARMUP steps, then linear down to zero."""
    warmup = min(WARMUP, max(1, steps // 4))
    return min((step + 1) / warmup, (steps - step) / max(1, steps - warmup), 1.0)


@dataclass(frozen=True)
class FitResult:
    """Errors are relative to the target: the root of the mean over guard tokens of |output - target|^2 / |target|^2."""

    steps: int
    before: float
    after: float
    kept: bool
    seconds: float

    def as_record(self) -> Fit:
        """Steps, errors on the guard and seconds, rounded for the record."""
        return Fit(self.steps, round(self.before, 6), round(self.after, 6), self.kept, round(self.seconds, 2))


def fit_examples(
    forward: Callable[..., Tensor],
    parameters: Sequence[Tensor],
    fit: Sequence[Example],
    guard: Sequence[Example],
    *,
    steps: int,
    rate: float,
    cast: Callable[[], AbstractContextManager] = nullcontext,
    clock: TimeLimit = FOREVER,
) -> FitResult:
    """Change `parameters` in place so that `forward(hidden, **arguments)` comes near the targets of `fit`.

    Adam at `rate` times `pace(step, steps)`. `cast` gives the numbers in which products are taken; where the `clock`
    runs, the pace is at least that of the time gone. The order of batches is random, every batch once before one comes
    again. Where the error on `guard` is not lower at the end (or a number is not finite), the parameters are put back
    bit for bit. Gradients and `requires_grad` flags are left as they were found.
    """
    start = perf_counter()
    before = relative_error(forward, guard)
    saved = [p.detach().clone() for p in parameters]
    sound, done = True, 0
    with trainable(parameters), torch.enable_grad():
        optimizer = torch.optim.Adam(parameters, lr=rate, betas=BETAS)
        for step, number in zip(track(range(steps), "steps", "steps/s"), order(len(fit)), strict=False):
            if (late := clock.gone) >= 1:
                break
            optimizer.param_groups[0]["lr"] = rate * pace(max(step, int(late * steps)), steps)
            with cast():
                loss = mean_error(forward, fit[number])
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            sound = bool(torch.isfinite(loss.detach()))
            if not sound:
                break
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
            done = step + 1
    after = relative_error(forward, guard) if sound else float("inf")
    kept = after < before  # false for a number that is none
    if not kept:
        with torch.no_grad():
            for parameter, old in zip(parameters, saved, strict=True):
                parameter.copy_(old)
    return FitResult(done, before, after, kept, perf_counter() - start)


def mean_error(forward: Callable[..., Tensor], example: Example) -> Tensor:
    """Mean over real tokens of |output - target|^2 / |target|^2.

    Per token, since in pre-norm models a few tokens have a hundred times the size of the others and would be all that a
    plain mean sees.
    """
    out = forward(example.hidden, **example.arguments)
    target = example.target.to(out.device)
    if example.mask is not None:
        real = example.mask.bool()
        out, target = out[real], target[real]
    size = target.square().sum(-1)
    size = size.clamp_min(1e-6 * float(size.mean()) + torch.finfo(size.dtype).tiny)
    return ((out - target).square().sum(-1) / size).mean()


@torch.no_grad()
def relative_error(forward: Callable[..., Tensor], examples: Sequence[Example]) -> float:
    """Root of `mean_error` over all tokens of all batches."""
    total, tokens = 0.0, 0
    for example in examples:
        count = example.target[..., 0].numel() if example.mask is None else int(example.mask.bool().sum())
        if count:
            total, tokens = total + float(mean_error(forward, example)) * count, tokens + count
    return (total / max(tokens, 1)) ** 0.5


def order(count: int) -> Iterator[int]:
    """Batch numbers without end, every batch once a round."""
    generator = torch.Generator().manual_seed(0)
    while True:
        yield from torch.randperm(count, generator=generator).tolist()


@contextmanager
def trainable(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Gradients for these for a while."""
    before = [(p.requires_grad, p.grad) for p in parameters]
    try:
        for p in parameters:
            p.requires_grad_(True)
        yield
    finally:
        for p, (flag, grad) in zip(parameters, before, strict=True):
            p.grad = grad
            p.requires_grad_(flag)


def fit_span(
    forward: Callable[..., Tensor],
    parameters: Sequence[Tensor],
    fit: Sequence[Example],
    guard: Sequence[Example],
    phase: Phase,
    clock: TimeLimit = FOREVER,
    device: str = "cpu",
    most: Callable[[int], int] = lambda steps: steps,
) -> FitResult:
    """Fit in place, by products on a kind of `device`; the parameters are put back where the guard does not gain, after
    a second try at a gentler rate. `most` says before each try how many of so many steps may be taken; the first takes
    one at least.
    """
    wanted = max(1, min(phase.steps, EPOCHS * len(fit)))
    steps = max(1, most(wanted))
    cast = products(fit[0].hidden.shape[-1], device)
    done = fit_examples(forward, parameters, fit, guard, steps=steps, rate=phase.rate, clock=clock, cast=cast)
    if done.kept or clock.gone >= 1 or not (steps := most(wanted)):
        return done
    return fit_examples(forward, parameters, fit, guard, steps=steps, rate=GENTLER * phase.rate, clock=clock, cast=cast)


def products(width: int, device: str) -> Callable[[], AbstractContextManager]:
    """In which numbers products are taken: bf16 with fp32 sums where the hardware has such products and hidden states
    are wide enough to gain by them.
    """
    if width < NARROW or not has_bf16(device):
        return nullcontext
    return lambda: torch.autocast(device, torch.bfloat16)
