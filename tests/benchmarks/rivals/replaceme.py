"""ReplaceMe (arXiv 2505.02819): a block goes, and a linear map behind the MLP before it, multiplied into that MLP's
output projection, stands for it; by least squares or by the least cosine distance (Adam).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.benchmarks.rivals.common import (
    Batches,
    blocks,
    check_adds,
    cosine,
    down,
    least_squares,
    means,
    seen,
    without_block,
)

EPOCHS, RATE, TOKENS = 10, 1e-4, 1024  # of the cosine form


def chosen(model: nn.Module, batches: Batches, count: int) -> int:
    """Where the block begins whose ends are nearest by cosine; a layer stays before it."""
    starts = range(1, len(blocks(model)) - count + 1)
    alike = means(model, batches, [(i, i + count) for i in starts], cosine)
    return max(starts, key=lambda i: alike[i - 1])


def sides(model: nn.Module, batches: Batches, start: int, count: int) -> tuple[Tensor, Tensor]:
    """What the MLP before the block gives (N, D), and what it would have to give instead."""
    before, end = blocks(model)[start - 1], blocks(model)[start + count - 1]
    check_adds(model, "ReplaceMe")
    places = {"mlp": (down(before), "out"), "behind": (before, "out"), "end": (end, "out")}
    found = seen(model, batches, places)
    return found["mlp"], found["end"] - (found["behind"] - found["mlp"])


@torch.no_grad()
def put(model: nn.Module, start: int, count: int, change_DD: Tensor) -> None:
    """The map into the projection before the block, which goes."""
    last = down(blocks(model)[start - 1])
    inputs_first = not isinstance(last, nn.Linear)  # GPT-2's
    last.weight.copy_(last.weight @ change_DD if inputs_first else change_DD.T @ last.weight)
    if last.bias is not None:
        last.bias.copy_(change_DD.T @ last.bias)
    without_block(model, start, count)


def by_least_squares(model: nn.Module, batches: Batches, count: int) -> None:
    start = chosen(model, batches, count)
    put(model, start, count, least_squares(*sides(model, batches, start, count)))


def by_cosine(model: nn.Module, batches: Batches, count: int) -> None:
    """From the identity, by Adam."""
    start = chosen(model, batches, count)
    mlp, goal = sides(model, batches, start, count)
    change = torch.eye(mlp.shape[1], device=mlp.device, requires_grad=True)
    optimizer, draws = torch.optim.Adam([change], lr=RATE), torch.Generator().manual_seed(0)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(mlp), generator=draws).split(TOKENS):
            with torch.enable_grad():
                distance = 1 - cosine(mlp[rows] @ change, goal[rows]).mean()
            optimizer.zero_grad()
            distance.backward()
            optimizer.step()
    put(model, start, count, change.detach())
