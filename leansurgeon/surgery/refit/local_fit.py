"""Fit one block to what it should give, without labels and without a backward pass through the model. Imports torch.

The block gets hidden states (of the network as it is already cut) and targets (what the teacher has at the same place),
and Adam lowers the error of its own output for a few steps, one batch at a time. Memory is that of one block. The
result stays only if samples that took no part in the fitting confirm it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from math import cos, isfinite, pi
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from leansurgeon.checkpoints.recorded.decided import Fit
from leansurgeon.errors import UsageError
from leansurgeon.progress import track
from leansurgeon.surgery.refit.heal_block import BlockFit, Samples

STEPS, RATE = 150, 1e-3
WARMUP = 5  # steps


@dataclass(frozen=True)
class Clock:
    """How long fitting may take: `seconds` from `start` on; None: as long as it takes."""

    seconds: float | None = None
    start: float = field(default_factory=perf_counter)

    @property
    def gone(self) -> float:
        """The share of the time that has gone; 1 or more: it is over."""
        return 0.0 if self.seconds is None else (perf_counter() - self.start) / max(self.seconds, 1e-9)

    def part(self, share: float) -> Clock:
        """A clock for so much of what is left."""
        return Clock() if self.seconds is None else Clock(share * max(0.0, self.seconds * (1 - self.gone)))


@dataclass(frozen=True)
class Example:
    """One batch: what enters the block `(B, T, width)`, what should come out, which tokens are real `(B, T)`, and other
    arguments of the block (masks, rotary tables).
    """

    hidden: Tensor
    target: Tensor
    mask: Tensor | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Fitted:
    """Errors are relative to the target: the root of the mean over guard tokens of |output - target|^2 / |target|^2."""

    steps: int
    before: float
    after: float
    kept: bool
    seconds: float

    def recorded(self) -> Fit:
        """Steps, errors on the guard and seconds, rounded for the record."""
        return Fit(self.steps, round(self.before, 6), round(self.after, 6), self.kept, round(self.seconds, 2))


def fit_examples(
    forward: Callable[..., Tensor],
    parameters: Sequence[Tensor],
    fit: Sequence[Example],
    guard: Sequence[Example],
    *,
    steps: int = STEPS,
    rate: float = RATE,
    seed: int = 0,
    betas: tuple[float, float] = (0.9, 0.999),
    pace: Callable[[int, int], float] | None = None,
    cast: Callable[[], AbstractContextManager] = nullcontext,
    clock: Clock | None = None,
) -> Fitted:
    """Change `parameters` in place so that `forward(hidden, **arguments)` comes near the targets of `fit`.

    Adam at `rate` times `pace(step, steps)`, by default after a short warm-up falling as a cosine to zero. `cast` gives
    the numbers in which products are taken; where the `clock` runs, the pace is at least that of the time gone. The
    order of batches is drawn by `seed`, every batch once before one comes again. Where the error on `guard` is not
    lower at the end (or a number is not finite), the parameters are put back bit for bit. Gradients and `requires_grad`
    flags are left as they were found.
    Raises `UsageError` without samples to fit or to guard, or for steps and rates that are not positive.
    """
    if not fit or not guard:
        raise UsageError(
            f"Local fitting needs sample batches to fit and to guard; there are {len(fit)} and {len(guard)}."
        )
    if steps < 1 or not (isfinite(rate) and rate > 0):
        raise UsageError(f"Local fitting needs a positive number of steps and rate; {steps} and {rate:g} were given.")
    start = perf_counter()
    before = relative_error(forward, guard)
    saved = [p.detach().clone() for p in parameters]
    sound, pace, clock, done = True, pace or schedule, clock or Clock(), 0
    with trainable(parameters), torch.enable_grad():
        optimizer = torch.optim.Adam(parameters, lr=rate, betas=betas)
        for step, number in zip(track(range(steps), "steps", "steps/s"), order(len(fit), seed), strict=False):
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
    return Fitted(done, before, after, kept, perf_counter() - start)


def fit_block(site: BlockFit, steps: int = STEPS) -> Fit:
    """Fit all weights of the filled block of a `BlockFit` to its targets, guarded by its guard samples; the numbers."""

    def examples(samples: Samples) -> list[Example]:
        """Every batch with its target and mask."""
        return [
            Example(samples.hidden[b], samples.target[b], samples.masks[b], {"samples": samples, "batch": b})
            for b in range(len(samples))
        ]

    def forward(hidden: Tensor, samples: Samples, batch: int) -> Tensor:
        """The block on one batch."""
        return samples.stream.call(batch, hidden, site.layer)

    parameters = [p for p in site.block.parameters() if p.requires_grad]
    done = fit_examples(forward, parameters, examples(site.fit), examples(site.guard), steps=steps)
    return done.recorded()


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


def schedule(step: int, steps: int) -> float:
    """Share of the peak rate: linear up over WARMUP steps, then half a cosine down."""
    return min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + cos(pi * step / steps))


def order(count: int, seed: int) -> Iterator[int]:
    """Batch numbers without end, every batch once a round."""
    generator = torch.Generator().manual_seed(seed)
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
