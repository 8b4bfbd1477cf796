"""LaCo (arXiv 2402.11187): runs of layers merge into their first by the sum of the differences to it, from the last
layers on, where the model's last hidden states stay alike.

The paper sets a threshold of the cosine and takes what number of layers results. Here the number is given: of the
thresholds tried, the highest that reaches it counts, and the last run is as short as it has to be.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from tests.benchmarks.rivals.common import Batches, blocks, cosine, seen

MERGED = 4  # layers that become one at most (C of the paper)
APART = 2  # layers between two merges at least (I of the paper)
THRESHOLDS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5, 0.3, 0.0, -1.0)


def laco(model: nn.Module, batches: Batches, count: int) -> None:
    few = batches[:2]  # the paper compares on a few sentences
    target = last(model, few)
    whole = blocks(model)
    for threshold in THRESHOLDS:
        found = collapse(model, whole, few, target, count, threshold)
        if len(found) == len(whole) - count:
            break
    model.model.layers = found
    model.config.num_hidden_layers = len(found)


def last(model: nn.Module, batches: Batches) -> Tensor:
    """The hidden states behind the last block."""
    return seen(model, batches, {"end": (blocks(model)[-1], "out")})["end"]


def collapse(
    model: nn.Module, whole: nn.ModuleList, batches: Batches, target: Tensor, count: int, threshold: float
) -> nn.ModuleList:
    """The layers that are left at one threshold."""
    layers, left = list(whole), count
    at = len(layers) - 2
    while at >= 0 and left:
        number = min(MERGED - 1, left, len(layers) - 1 - at)
        tried = [*layers[:at], merged(layers[at : at + number + 1]), *layers[at + number + 1 :]]
        model.model.layers = nn.ModuleList(tried)
        if float(cosine(last(model, batches), target).mean()) > threshold:
            layers, left = tried, left - number
            at -= APART
        else:
            at -= 1
    model.model.layers = whole
    return nn.ModuleList(layers)


@torch.no_grad()
def merged(run: list[nn.Module]) -> nn.Module:
    """The first layer with the differences of all others to it added."""
    one = copy.deepcopy(run[0])
    for name, values in one.named_parameters():
        first = run[0].get_parameter(name)
        for other in run[1:]:
            values.add_(other.get_parameter(name) - first)
    return one
