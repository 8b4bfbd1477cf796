"""Prune&Comp (arXiv 2507.18212): again and again the layer of the least block influence goes, and the hidden state at
its place is brought to the size that it had behind it. Its paper multiplies the weights of all that writes into the
state before the cut; here the state itself is multiplied, which is the same number.
"""

from __future__ import annotations

import torch
from torch import nn

from tests.benchmarks.rivals.common import Batches, between, blocks, cosine, means, watched, width
from tests.benchmarks.rivals.dropping import few
from tests.benchmarks.rivals.linearpatch import put_patch

TOKENS = 16_384  # the model runs twice on them for every layer that goes


@torch.no_grad()
def compensated(model: nn.Module, batches: Batches, count: int) -> None:
    some = list(few(batches, TOKENS))
    for _ in range(count):
        spans = [(i, i + 1) for i in range(len(blocks(model)))]
        alike = means(model, some, spans, cosine)
        least = max(range(len(spans)), key=lambda i: alike[i])
        sizes = [0.0, 0.0]
        for part in watched(model, some, between(model)):
            states = [*part.values()]
            sizes = [size + float(states[least + i].norm(dim=1).double().sum()) for i, size in enumerate(sizes)]
        put_patch(model, least, 1, torch.eye(width(model), device=model.device) * (sizes[1] / sizes[0]))
