"""LinearPatch (arXiv 2505.24680): a block goes, and where it was the hidden state is turned by a Hadamard matrix,
scaled channel by channel to the size it would have had, and turned back: one symmetric matrix D x D.

The matrix stays in the model as a module of its own, which a plain checkpoint could not hold: this rival is allowed
more than the others (`folded` is what a plain one holds). Widths that are no power of two take a Hadamard matrix of
their largest such factor and a cosine transform of the rest.
"""

from __future__ import annotations

import torch
from scipy.fft import dct
from scipy.linalg import hadamard
from torch import Tensor, nn

from tests.benchmarks.rivals.common import Batches, between, blocks, most_alike, put_blocks, watched, without_block


def linearpatch(model: nn.Module, batches: Batches, count: int) -> None:
    start = most_alike(model, batches, count)
    put_patch(model, start, count, patch_for(model, batches, start, count))


def put_patch(model: nn.Module, start: int, count: int, patch: Tensor) -> None:
    """The matrix (D, D) in the place of `count` layers from `start` on."""
    without_block(model, start, count)
    inside = list(blocks(model))
    if start < len(inside):
        inside[start] = Patched(inside[start], patch)
    else:
        inside[-1] = Patched(inside[-1], patch, behind=True)
    put_blocks(model, inside)


def patch_for(model: nn.Module, batches: Batches, start: int, count: int) -> Tensor:
    """(D, D) that stands for `count` layers from `start` on."""
    sums, turn = [0.0, 0.0], None
    for part in watched(model, batches, between(model)):
        states = list(part.values())
        for i, state in enumerate((states[start], states[start + count])):
            turn = rotation(state.shape[1]).to(state) if turn is None else turn
            sums[i] = sums[i] + (state @ turn).abs().double().sum(0)
    return turn @ torch.diag((sums[1] / sums[0].clamp(min=1e-9)).float()) @ turn.T


def rotation(width: int) -> Tensor:
    """An orthogonal matrix that spreads every channel over all."""
    two = width & -width
    rest = width // two
    cosines = torch.from_numpy(dct(torch.eye(rest).double().numpy(), norm="ortho"))
    return torch.kron(torch.from_numpy(hadamard(two)).double() / two**0.5, cosines).float()


class Patch(nn.Module):
    """The matrix alone."""

    def __init__(self, patch_DD: Tensor) -> None:
        super().__init__()
        self.register_buffer("patch", patch_DD)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.patch


class Patched(nn.Module):
    """The matrix before a block, or behind it; the block is asked for what it is as ever."""

    def __init__(self, block: nn.Module, patch_DD: Tensor, *, behind: bool = False) -> None:
        super().__init__()
        self.block, self.patch, self.is_behind = block, Patch(patch_DD), behind

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> object:
        if not self.is_behind:
            return self.block(self.patch(hidden_states), *args, **kwargs)
        out = self.block(hidden_states, *args, **kwargs)
        return (self.patch(out[0]), *out[1:]) if isinstance(out, tuple) else self.patch(out)
