"""Importance of heads after Michel, Levy and Neubig, "Are Sixteen Heads Really Better than One?" (arXiv 1905.10650).

    I_h = E_x | dL(x) / dxi_h | = E_x | Att_h(x)^T dL(x) / dAtt_h(x) |            (their equation 2)

where xi_h = 1 multiplies head h. No such variable is needed: the output projection is linear, so with x_h the slice of
its input that is head h and g_h the gradient there, dL/dxi_h is the sum of x_h * g_h over the sample's tokens and
channels. One forward and one backward pass compute it for every sample of a batch, since samples are independent.

The absolute value is taken of a sample's sum, as in the paper; its released code takes that of every token, and the
well-known `run_bertology.py` that of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from leansurgeon.errors import Diverged, LeanSurgeonError
from leansurgeon.measure.costs.precision import at_rest
from leansurgeon.measure.data.batches import Batch, on, rows_of
from leansurgeon.measure.heads.judge import Labelled, OutputScorer
from leansurgeon.measure.heads.sites import Site, heads_of, hook_sites
from leansurgeon.progress import track


def importance(judge: Labelled | OutputScorer, sites: Sequence[Site], batches: Iterable[Batch]) -> np.ndarray:
    """Return the importance of every head, (all heads,) in the order of `sites`, in fp64.

    The weights need no gradient; without it only activations are stored. The paper normalizes the heads of each
    attention by their l2 norm; that hides that some layers matter more than others, and made pruning worse on a small
    GPT-2, so it is not done here.

    Raises `Diverged` if a gradient is not finite.
    """
    total, samples = [np.zeros(site.heads) for site in sites], 0
    device = next(judge.loaded.model.parameters()).device
    for number, batch in track(list(enumerate(batches)), "importance of heads", "batches/s"):
        batch = on(batch, device)
        with at_rest(judge.loaded.model, device):
            slopes = slopes_of_batch(judge, sites, batch, number)
        samples += rows_of(batch)
        for sums, slope in zip(total, slopes, strict=True):
            sums += slope.cpu().double().abs().sum(0).numpy()
    if not samples:
        raise LeanSurgeonError("Importance needs at least one sample.")
    scores = np.concatenate(total) / samples
    if not np.isfinite(scores).all():
        raise Diverged("A gradient is NaN or infinite, so heads have no importance.", "Start from a sound checkpoint.")
    return scores


def slopes_of_batch(
    judge: Labelled | OutputScorer, sites: Sequence[Site], batch: Batch, number: int = 0
) -> list[Tensor]:
    """Return dL/dxi of every site for one batch: (B, H)."""
    rows = rows_of(batch)
    inputs = [None] * len(sites)

    def change(i: int, x: Tensor) -> Tensor:
        # If nothing before needs a gradient (frozen weights, the first layer), the graph starts here.
        inputs[i] = x if x.requires_grad else x.detach().requires_grad_()
        return inputs[i]

    with torch.enable_grad(), hook_sites(judge.loaded.model, sites, change):
        output = judge.forward(batch)
        if missing := next((site.module for site, x in zip(sites, inputs, strict=True) if x is None), None):
            raise LeanSurgeonError(f"'{missing}' did not run on this data, so its heads have no importance.")
        total = judge.slopes(output, batch, number).sum()
        gradients = torch.autograd.grad(total, inputs)
    by_site = []
    for site, x, g in zip(sites, inputs, gradients, strict=True):
        kind = torch.promote_types(x.dtype, torch.float32)
        by_site.append((heads_of(x.detach(), site, rows).to(kind) * heads_of(g, site, rows)).sum(-1).sum(1))
    return by_site
