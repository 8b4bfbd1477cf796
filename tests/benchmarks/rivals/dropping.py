"""Layers that are dropped and nothing else: ShortGPT (arXiv 2403.03853), the block of the smallest angle (2403.17887)
and SLEB (2402.09025).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from tests.benchmarks.rivals.common import Batches, blocks, cosine, keep, most_alike, states, without_block


def shortgpt(model: nn.Module, batches: Batches, count: int) -> None:
    """The layers of the least block influence, 1 - cos(input, output), go."""
    h = states(model, batches)
    influence = [float(1 - cosine(a, b).mean()) for a, b in pairwise(h)]
    gone = sorted(range(len(influence)), key=lambda i: influence[i])[:count]
    keep(model, (i for i in range(len(influence)) if i not in gone))


def smallest_angle(model: nn.Module, batches: Batches, count: int) -> None:
    """One block of neighbours goes: that between whose ends the hidden state turns least. All tokens count; the paper
    looks at the last of each text.
    """
    without_block(model, most_alike(model, batches, count), count)


@torch.no_grad()
def loss(model: nn.Module, batches: Batches) -> float:
    """Nats a token."""
    total = sum(float(model(input_ids=ids, labels=ids, use_cache=False).loss) * ids.numel() for ids in batches)
    return total / sum(ids.numel() for ids in batches)


def sleb(model: nn.Module, batches: Batches, count: int) -> None:
    """Again and again the layer goes without which the loss is least."""
    whole = blocks(model)
    left = list(range(len(whole)))

    def without(i: int) -> float:
        model.model.layers = nn.ModuleList(whole[j] for j in left if j != i)
        return loss(model, batches)

    for _ in range(count):
        left.remove(min(left, key=without))
    model.model.layers = whole
    keep(model, left)
