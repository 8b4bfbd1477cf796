"""Learning rate and momentum as pure functions of the step: nothing to save, the same on any number of processes."""

from __future__ import annotations

import math

from leansurgeon.training.recipe.settings import Schedule


def lr_at(step: float, shape: Schedule, *, total: float, warmup: float, peak: float) -> float:
    """Learning rate of optimizer step `step` (from 0) of `total`.

    `cosine` (Loshchilov and Hutter, 2017, without restarts), `linear` and `constant` rise linearly from 0 (or the
    `warmup_lr` of `shape`) to `peak` over the first `warmup` steps and fall towards `min_lr`, which would be reached at
    step `total`; they count as `transformers.get_scheduler` does. `one-cycle` counts as
    `torch.optim.lr_scheduler.OneCycleLR` does, with `warmup`
    steps in the place of pct_start * total. `triangle` knows no warm-up. The last two read their numbers from `shape`.
    """
    if shape.name == "one-cycle":
        low, last = peak / shape.div, peak / shape.div / shape.final_div
        return _cycle(step, total, warmup, low, peak, last, shape.anneal)
    if shape.name == "triangle":
        done = step / total
        rising = shape.base + done * (1 - shape.base) / (1 - shape.fall)
        return peak * max(0.0, min(rising, (1 - done) / shape.fall))
    if step < warmup:
        return shape.warmup_lr + (peak - shape.warmup_lr) * step / warmup
    if shape.name == "constant":
        return peak
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    left = 0.5 * (1.0 + math.cos(math.pi * done)) if shape.name == "cosine" else 1.0 - done
    return shape.min_lr + (peak - shape.min_lr) * left


def momentum_at(step: float, shape: Schedule, *, total: float, warmup: float) -> float | None:
    """beta1 (or SGD's momentum) of a one-cycle schedule that cycles it; None where it stays as it is."""
    if shape.name != "one-cycle" or shape.momentum is None:
        return None
    least, most = shape.momentum
    return _cycle(step, total, warmup, most, least, most, shape.anneal)


def _cycle(step: float, total: float, warmup: float, first: float, middle: float, last: float, anneal: str) -> float:
    """From `first` to `middle` at step warmup - 1, then to `last` at step total - 1."""
    top, end = warmup - 1, total - 1
    if step <= top and top > 0:
        a, b, done = first, middle, step / top
    else:
        a, b, done = middle, last, min(1.0, (step - top) / max(1e-9, end - top))
    if anneal == "cosine":
        return b + (a - b) / 2 * (1 + math.cos(math.pi * done))
    return a + (b - a) * done
