"""One judge for all: how far a cut model is from the whole one on samples that nobody was calibrated on. fp32."""

from __future__ import annotations

from collections.abc import Mapping
from tempfile import NamedTemporaryFile

import torch
from torch import Tensor, nn

from tests.benchmarks.rivals.common import Batch, Batches, is_causal

Row = dict[str, float]
IGNORED = -100


@torch.no_grad()
def said_by(source: nn.Module, domains: Mapping[str, Batches]) -> Mapping[str, list[tuple[Tensor, Tensor]]]:
    """What the source predicts on every domain: `predictions` of every batch."""
    found: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in domains}
    for name, batches in domains.items():
        for logs, wanted in (predictions(source, batch) for batch in batches):
            found[name].append((at_rest(logs), wanted))
    return found


@torch.no_grad()
def judged(
    said: Mapping[str, list[tuple[Tensor, Tensor]]], cut: nn.Module, domains: Mapping[str, Batches]
) -> dict[str, Row]:
    """By domain: perplexity of the cut over the source's, the divergence of its predictions in nats a prediction, and
    the share of labels that it gets right. `said` is what the source said of the same domains.
    """
    found = {}
    for name, batches in domains.items():
        losses, divergence, right, count = [0.0, 0.0], 0.0, 0, 0
        for batch, (first, wanted) in zip(batches, said[name], strict=True):
            second, _ = predictions(cut, batch)
            for i, logs in enumerate((first, second)):
                losses[i] -= float(logs.gather(-1, wanted[:, None]).double().sum())
            divergence += float((first.exp() * (first - second)).sum(-1).double().sum())
            right += int((second.argmax(-1) == wanted).sum())
            count += len(wanted)
        ratio = float(torch.tensor((losses[1] - losses[0]) / count, dtype=torch.float64).exp())
        found[name] = {"ratio": ratio, "kl": divergence / count, "right": right / count, "predictions": count}
    return found


def at_rest(values: Tensor) -> Tensor:
    """The same in a file without a name: the system takes its memory where memory gets scarce. On a GPU as it is."""
    if values.is_cuda:
        return values
    with NamedTemporaryFile() as file:
        held = torch.from_file(file.name, shared=True, size=values.numel(), dtype=values.dtype)
    return held.view(values.shape).copy_(values)


def predictions(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """(N, V) log probabilities where there is a label, and the labels (N,)."""
    causal = is_causal(model)
    given = {key: value for key, value in batch.items() if key != "labels"} | ({"use_cache": False} if causal else {})
    logits, labels = model(**given).logits, batch["labels"]
    if causal:
        logits, labels = logits[:, :-1], labels[:, 1:]
    logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    scored = labels != IGNORED
    return logits[scored].float().log_softmax(-1), labels[scored]
