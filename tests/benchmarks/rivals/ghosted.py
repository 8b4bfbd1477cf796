"""Ghosted Layers (arXiv 2605.15491): a block goes, and where it was the hidden state is multiplied by the full matrix
D x D that brings it nearest, by least squares, to the one behind the block. The matrix stays in the model as a module
of its own, as with `linearpatch`.
"""

from __future__ import annotations

import torch
from torch import nn

from tests.benchmarks.rivals.common import Batches, between, least_squares, most_alike, seen
from tests.benchmarks.rivals.linearpatch import put_patch


@torch.no_grad()
def ghosted(model: nn.Module, batches: Batches, count: int) -> None:
    start = most_alike(model, batches, count)
    places = list(between(model).items())
    before, behind = seen(model, batches, dict((places[start], places[start + count]))).values()
    put_patch(model, start, count, least_squares(before, behind))
