"""Importance of heads after Michel, Levy and Neubig, "Are Sixteen Heads Really Better than One?" (arXiv 1905.10650).

    I_h = E_x | dL(x) / dxi_h | = E_x | Att_h(x)^T dL(x) / dAtt_h(x) |            (their equation 2)

where xi_h multiplies head h and is 1. No such variable is needed: the output projection is linear, so with x_h the
slice of its input that is head h and g_h the gradient there, dL/dxi_h is the sum of x_h * g_h over the sample's tokens
and channels. One forward and one backward pass give it for every sample of a batch, since samples do not meet.

What is summed before the absolute value is taken differs in the wild: `sample` is the paper, `token` its released code,
`batch` the well-known `run_bertology.py` (which is the paper's with one sample a batch, and another thing with more).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from leansurgeon.errors import Diverged, LeanSurgeonError, UsageError
from leansurgeon.measure.costs.precision import at_rest
from leansurgeon.measure.data.batches import Batch, on, rows_of
from leansurgeon.measure.heads.judge import Labelled, Unlabelled
from leansurgeon.measure.heads.sites import Site, heads_of, hooked, split
from leansurgeon.progress import track

REDUCTIONS = ("sample", "token", "batch")
NORMALISE = ("none", "layer")


def importance(
    judge: Labelled | Unlabelled,
    sites: Sequence[Site],
    batches: Iterable[Batch],
    *,
    reduction: str = "sample",
    normalise: str = "none",
) -> np.ndarray:
    """Importance of every head, (all heads,) in the order of `sites`, in fp64.

    The weights need no gradient, and where they have none only activations are kept. With `normalise` "layer" the heads
    of each attention are divided by their l2 norm, the paper's advice; it hides that some layers matter more than
    others, so it is off by default (facts: it made pruning worse on a small GPT-2).

    Raises `Diverged` where a gradient is not finite.
    """
    check(reduction, normalise)
    total, samples = [np.zeros(site.heads) for site in sites], 0
    device = next(judge.loaded.model.parameters()).device
    for number, batch in track(list(enumerate(batches)), "importance of heads", "batches/s"):
        batch = on(batch, device)
        with at_rest(judge.loaded.model, device):
            slopes = slopes_of_batch(judge, sites, batch, number, per_token=reduction == "token")
        rows = len(slopes[0])
        samples += rows
        for sums, slope in zip(total, slopes, strict=True):
            slope = slope.cpu().double()
            sums += (slope.sum((0, 1)).abs() if reduction == "batch" else slope.abs().sum((0, 1))).numpy()
    if not samples:
        raise LeanSurgeonError("Importance needs at least one sample.")
    scores = np.concatenate(total) / samples
    if not np.isfinite(scores).all():
        raise Diverged("A gradient is NaN or infinite, so heads have no importance.", "Start from a sound checkpoint.")
    return normalised(scores, sites) if normalise == "layer" else scores


def check(reduction: str, normalise: str) -> None:
    """Raises `UsageError` for a convention that there is none."""
    if reduction not in REDUCTIONS:
        raise UsageError(f"--reduction {reduction}: give one of {', '.join(REDUCTIONS)}.")
    if normalise not in NORMALISE:
        raise UsageError(f"--normalize {normalise}: give one of {', '.join(NORMALISE)}.")


def slopes_of_batch(
    judge: Labelled | Unlabelled, sites: Sequence[Site], batch: Batch, number: int = 0, *, per_token: bool = False
) -> list[Tensor]:
    """dL/dxi of every site for one batch: (B, 1, H), or (B, T, H) by token."""
    rows = rows_of(batch)
    inputs: list[Tensor | None] = [None] * len(sites)

    def change(i: int, x: Tensor) -> Tensor:
        # Where nothing before needs a gradient (frozen weights, the first layer), the graph starts here.
        inputs[i] = x if x.requires_grad else x.detach().requires_grad_()
        return inputs[i]

    with torch.enable_grad(), hooked(judge.loaded.model, sites, change):
        output = judge.forward(batch)
        if missing := next((site.module for site, x in zip(sites, inputs, strict=True) if x is None), None):
            raise LeanSurgeonError(f"'{missing}' did not run on this data, so its heads have no importance.")
        total = judge.slopes(output, batch, number).sum()
        gradients = torch.autograd.grad(total, inputs)
    by_site = []
    for site, x, g in zip(sites, inputs, gradients, strict=True):
        kind = torch.promote_types(x.dtype, torch.float32)
        slopes_BTH = (heads_of(x.detach(), site, rows).to(kind) * heads_of(g, site, rows)).sum(-1)
        by_site.append(slopes_BTH if per_token else slopes_BTH.sum(1, keepdim=True))
    return by_site


def normalised(values: np.ndarray, sites: Sequence[Site]) -> np.ndarray:
    """Every attention's heads divided by their l2 norm (left alone where that is 0)."""
    return np.concatenate([part / (np.linalg.norm(part) or 1.0) for part in split(values, sites)])
