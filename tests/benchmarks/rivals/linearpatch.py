"""LinearPatch (arXiv 2505.24680): a block goes, and where it was the hidden state is turned by a Hadamard matrix,
scaled channel by channel to the size it would have had, and turned back: one symmetric matrix D x D.

The matrix stays in the model as a module of its own, which a plain checkpoint could not hold: this rival is allowed
more than the others. Widths that are no power of two take a Hadamard matrix of their largest such factor and a cosine
transform of the rest.
"""

from __future__ import annotations

import torch
from scipy.fft import dct
from scipy.linalg import hadamard
from torch import Tensor, nn

from tests.benchmarks.rivals.common import Batches, blocks, most_alike, states, without_block


def linearpatch(model: nn.Module, batches: Batches, count: int) -> None:
    start = most_alike(model, batches, count)
    h = states(model, batches)
    turn = rotation(h[0].shape[1])
    before, behind = (state @ turn for state in (h[start], h[start + count]))
    scale = behind.abs().mean(0) / before.abs().mean(0).clamp(min=1e-9)
    patch = turn @ torch.diag(scale) @ turn.T
    without_block(model, start, count)
    inside = blocks(model)
    if start < len(inside):
        inside[start] = Patched(inside[start], patch)
    else:
        model.model.norm = nn.Sequential(Patch(patch), model.model.norm)


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
    """The matrix before a block, which is asked for what it is as ever."""

    def __init__(self, block: nn.Module, patch_DD: Tensor) -> None:
        super().__init__()
        self.block, self.before = block, Patch(patch_DD)

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> object:
        return self.block(self.before(hidden_states), *args, **kwargs)
