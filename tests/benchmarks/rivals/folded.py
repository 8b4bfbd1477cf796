"""LinearPatch (see `linearpatch`) in a plain model. Its paper multiplies the whole hidden state, which is a sum of what
all layers before the cut have added, so no matrix of theirs can take the patch in. The nearest: what the patch adds to
the state h, h (P - 1), the MLP before the cut adds besides, by least squares from its units. Every token counts by its
relative error: plain least squares, which a few tokens of huge states decide, did worse (SmolLM2-135M at 27 layers,
10,240 tokens: 1.54 and 1.36 times the perplexity on Brown and Austen, against 1.43 and 1.29).
"""

from __future__ import annotations

import torch
from torch import nn

from tests.benchmarks.rivals.common import (
    Batches,
    blocks,
    check_adds,
    down,
    least_squares,
    most_alike,
    put_blocks,
    seen,
    without_block,
)
from tests.benchmarks.rivals.linearpatch import patch_for


@torch.no_grad()
def folded(model: nn.Module, batches: Batches, count: int) -> None:
    check_adds(model, "LinearPatch, folded,")
    start = most_alike(model, batches, count, first=1)
    patch = patch_for(model, batches, start, count)
    whole = list(blocks(model))
    last = down(whole[start - 1])
    put_blocks(model, whole[:start])  # what stands behind is not asked
    found = seen(model, batches, {"units": (last, "in"), "behind": (whole[start - 1], "out")})
    put_blocks(model, whole)
    units, wanted = found["units"], found["behind"] @ patch - found["behind"]
    if last.bias is not None:
        units = torch.cat([units, units.new_ones(len(units), 1)], 1)
    size = wanted.norm(dim=1, keepdim=True).clamp(min=1e-6)
    change = least_squares(units / size, wanted / size)
    if last.bias is not None:
        last.bias.add_(change[-1])
        change = change[:-1]
    last.weight.add_(change.T if isinstance(last, nn.Linear) else change)  # GPT-2's has its inputs first
    without_block(model, start, count)
