"""ReplaceMe (arXiv 2505.02819): a block goes, and a linear map behind the MLP before it, multiplied into that MLP's
output projection, stands for it; by least squares or by the least cosine distance (Adam).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.benchmarks.rivals.common import Batches, blocks, cosine, least_squares, seen, states, without_block

EPOCHS, RATE, TOKENS = 10, 1e-4, 1024  # of the cosine form


def chosen(model: nn.Module, batches: Batches, count: int) -> int:
    """Where the block begins whose ends are nearest by cosine; a layer stays before it."""
    h = states(model, batches)
    return max(range(1, len(blocks(model)) - count + 1), key=lambda i: float(cosine(h[i], h[i + count]).mean()))


def sides(model: nn.Module, batches: Batches, start: int, count: int) -> tuple[Tensor, Tensor]:
    """What the MLP before the block gives (N, D), and what it would have to give instead."""
    before, end = blocks(model)[start - 1], blocks(model)[start + count - 1]
    found = seen(
        model, batches, {"mlp": (before.mlp, "out"), "behind": (before, "out"), "end": (end, "out")}
    )  # fmt: skip
    return found["mlp"], found["end"] - (found["behind"] - found["mlp"])


@torch.no_grad()
def put(model: nn.Module, start: int, count: int, change_DD: Tensor) -> None:
    """The map into the projection before the block, which goes."""
    down = blocks(model)[start - 1].mlp.down_proj
    down.weight.copy_(change_DD.T @ down.weight)
    if down.bias is not None:
        down.bias.copy_(change_DD.T @ down.bias)
    without_block(model, start, count)


def by_least_squares(model: nn.Module, batches: Batches, count: int) -> None:
    start = chosen(model, batches, count)
    put(model, start, count, least_squares(*sides(model, batches, start, count)))


def by_cosine(model: nn.Module, batches: Batches, count: int) -> None:
    """From the identity, by Adam."""
    start = chosen(model, batches, count)
    mlp, goal = sides(model, batches, start, count)
    change = torch.eye(mlp.shape[1], requires_grad=True)
    optimizer, draws = torch.optim.Adam([change], lr=RATE), torch.Generator().manual_seed(0)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(mlp), generator=draws).split(TOKENS):
            with torch.enable_grad():
                distance = 1 - cosine(mlp[rows] @ change, goal[rows]).mean()
            optimizer.zero_grad()
            distance.backward()
            optimizer.step()
    put(model, start, count, change.detach())
