"""One judge for all: how far a cut model is from the whole one on windows that nobody was calibrated on. fp32."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from tests.benchmarks.rivals.common import Batches

Row = dict[str, float]


@torch.no_grad()
def judged(source: nn.Module, cut: nn.Module, domains: Mapping[str, Batches]) -> dict[str, Row]:
    """By domain: perplexity of the cut over the source's, and the divergence of its predictions in nats a token."""
    found = {}
    for name, batches in domains.items():
        losses, divergence, tokens = [0.0, 0.0], 0.0, 0
        for ids in batches:
            said = [model(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1) for model in (source, cut)]
            wanted = ids[:, 1:, None]
            for i, logs in enumerate(said):
                losses[i] -= float(logs.gather(-1, wanted).double().sum())
            divergence += float((said[0].exp() * (said[0] - said[1])).sum(-1).double().sum())
            tokens += wanted.numel()
        ratio = float(torch.tensor((losses[1] - losses[0]) / tokens, dtype=torch.float64).exp())
        found[name] = {"ratio": ratio, "kl": divergence / tokens, "tokens": tokens}
    return found
