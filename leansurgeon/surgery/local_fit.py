"""Fit blocks to target outputs, without labels and without a backward pass through the whole model. Imports torch.

Inputs are hidden states of the cut network, targets the teacher's hidden states at the same place; Adam lowers the
error of the blocks' own output for a few steps, one batch at a time. Memory is that of the blocks. A result is kept
only if samples not used for fitting confirm it.

At a cut, the block before it and the first one behind it are trained together to reproduce the source's output behind
them; then the span grows by kept blocks as long as guard samples improve. The loss weighs every token by its relative
error (`mean_error`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from leansurgeon.checkpoints.recorded.decided import Fit
from leansurgeon.measure.costs.precision import NARROW, autocast, has_bf16
from leansurgeon.progress import track

BETAS = (0.9, 0.98)
WARMUP = 10  # steps
STEP_TOKENS = 1_024  # tokens per step, padding included; for images, patches
LEAST_GAIN = 0.02  # of the guard's error; with less, the span grows no further
GENTLER = 0.25  # of the rate: for one more try if the guard did not improve at all
EPOCHS = 8  # how often a phase sees a sample at most


@dataclass(frozen=True)
class Phase:
    """One round of fitting: Adam's steps and peak rate."""

    steps: int
    rate: float


# Measured on SmolLM2-135M at 24 of 30 layers; the first fits two blocks, each later one two more.
PHASES = (Phase(240, 7e-4), Phase(160, 5e-4), Phase(96, 4e-4), Phase(64, 4e-4))


@dataclass(frozen=True)
class TimeLimit:
    """Time limit of fitting: `seconds` after `start`; None means no limit."""

    seconds: float | None = None
    start: float = field(default_factory=perf_counter)

    @property
    def gone(self) -> float:
        """Share of the time that has passed; 1 or more means it is over."""
        return 0.0 if self.seconds is None else (perf_counter() - self.start) / max(self.seconds, 1e-9)

    def part(self, share: float) -> TimeLimit:
        """Return a limit of this share of the time left."""
        return TimeLimit() if self.seconds is None else TimeLimit(share * max(0.0, self.seconds * (1 - self.gone)))


FOREVER = TimeLimit()


@dataclass(frozen=True)
class Example:
    """One batch: the block's input `(B, T, width)`, the target output, which tokens are real `(B, T)`, and other
    arguments of the block (masks, rotary tables).
    """

    hidden: Tensor
    target: Tensor
    mask: Tensor | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


def pace(step: int, steps: int) -> float:
    """Return the share of the peak rate: linear up over WARMUP steps, then linear down to zero."""
    warmup = min(WARMUP, max(1, steps // 4))
    return min((step + 1) / warmup, (steps - step) / max(1, steps - warmup), 1.0)


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
) -> Fit:
    """Change `parameters` in place so that `forward(hidden, **arguments)` comes close to the targets of `fit`.

    Errors are relative: the root of the mean over guard tokens of |output - target|^2 / |target|^2.

    Adam at `rate` times `pace(step, steps)`. `cast` sets the precision of products. With a limited `clock`, the
    schedule runs at least as fast as the time. Batches come in random order, each once per round. If the error on
    `guard` is not lower at the end (or a number is not finite), the parameters are restored bit for bit. Gradients and
    `requires_grad` flags are left as they were.
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
    kept = after < before  # False for NaN
    if not kept:
        with torch.no_grad():
            for parameter, old in zip(parameters, saved, strict=True):
                parameter.copy_(old)
    return Fit(done, before, after, kept, perf_counter() - start)


def mean_error(forward: Callable[..., Tensor], example: Example) -> Tensor:
    """Return the mean over real tokens of |output - target|^2 / |target|^2.

    Relative per token, since in pre-norm models a few tokens are a hundred times larger than the others and would
    dominate a plain mean.
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
    """Return the root of `mean_error` over all tokens of all batches."""
    total, tokens = 0.0, 0
    for example in examples:
        count = example.target[..., 0].numel() if example.mask is None else int(example.mask.bool().sum())
        if count:
            total, tokens = total + float(mean_error(forward, example)) * count, tokens + count
    return (total / max(tokens, 1)) ** 0.5


def order(count: int) -> Iterator[int]:
    """Yield batch numbers endlessly, every batch once per round."""
    generator = torch.Generator().manual_seed(0)
    while True:
        yield from torch.randperm(count, generator=generator).tolist()


@contextmanager
def trainable(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Enable gradients for these parameters within the context."""
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
) -> Fit:
    """Fit in place, with products on a kind of `device`; if the guard does not improve, try once more at a lower rate,
    then restore the parameters. Before each try, `most` returns how many of the given steps may be taken; the first try
    takes at least one.
    """
    wanted = max(1, min(phase.steps, EPOCHS * len(fit)))
    steps = max(1, most(wanted))
    cast = products(fit[0].hidden.shape[-1], device)
    done = fit_examples(forward, parameters, fit, guard, steps=steps, rate=phase.rate, clock=clock, cast=cast)
    if done.kept or clock.gone >= 1 or not (steps := most(wanted)):
        return done
    return fit_examples(forward, parameters, fit, guard, steps=steps, rate=GENTLER * phase.rate, clock=clock, cast=cast)


def products(width: int, device: str) -> Callable[[], AbstractContextManager]:
    """Return the context in which products are taken: bf16 with fp32 sums if the hardware has them and hidden states
    are wide enough to benefit.
    """
    if width < NARROW or not has_bf16(device):
        return nullcontext
    return partial(autocast, "bf16", device)
