"""Layers that are dropped and nothing else: ShortGPT (arXiv 2403.03853), the block of the smallest angle (2403.17887)
and SLEB (2402.09025).
"""

from __future__ import annotations

import torch
from torch import nn

from leansurgeon.surgery.local_fit import products
from tests.benchmarks.rivals.common import (
    Batches,
    blocks,
    cosine,
    keep,
    means,
    most_alike,
    put_blocks,
    width,
    without_block,
)
from tests.benchmarks.rivals.judge import predictions

TOKENS = 2_048  # of SLEB, which runs the model once for every layer and every loss; its paper takes some windows, too


def shortgpt(model: nn.Module, batches: Batches, count: int) -> None:
    """The layers of the least block influence, 1 - cos(input, output), go."""
    depth = len(blocks(model))
    alike = means(model, batches, [(i, i + 1) for i in range(depth)], cosine)
    gone = sorted(range(depth), key=lambda i: -alike[i])[:count]
    keep(model, [i for i in range(depth) if i not in gone])


def smallest_angle(model: nn.Module, batches: Batches, count: int) -> None:
    """One block of neighbours goes: that between whose ends the hidden state turns least. All tokens count; the paper
    looks at the last of each text.
    """
    without_block(model, most_alike(model, batches, count), count)


@torch.no_grad()
def loss(model: nn.Module, batches: Batches) -> float:
    """Nats a prediction."""
    total, number = 0.0, 0
    for batch in batches:
        with products(width(model), model.device.type)():
            logs, wanted = predictions(model, batch)
        total, number = total - float(logs.gather(-1, wanted[:, None]).double().sum()), number + len(wanted)
    return total / number


def few(batches: Batches, tokens: int = TOKENS) -> Batches:
    """The first batches that hold about so many tokens; an image counts as 64."""
    chosen, held = [], 0
    for batch in batches:
        if held >= tokens:
            break
        chosen.append(batch)
        held += batch["input_ids"].numel() if "input_ids" in batch else 64 * len(next(iter(batch.values())))
    return chosen


def sleb(model: nn.Module, batches: Batches, count: int) -> None:
    """Again and again the layer goes without which the loss is least."""
    whole, some = list(blocks(model)), few(batches)
    left = list(range(len(whole)))

    def without(i: int) -> float:
        put_blocks(model, [whole[j] for j in left if j != i])
        return loss(model, some)

    for _ in range(count):
        left.remove(min(left, key=without))
    put_blocks(model, [whole[j] for j in left])
