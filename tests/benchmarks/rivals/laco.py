"""LaCo (arXiv 2402.11187): runs of layers become one, from the last on, where the last hidden states stay alike.

By the paper's formula the projections of the first layer get the differences of all others to it added; in the authors'
notebook each difference is to what the sum is by then, which leaves the last layer's. Norms are the first layer's.

The paper sets a threshold of the cosine and the length of runs by hand. Here the number of layers is given: the highest
threshold that reaches it counts, the last run is as short as it has to be, and the length is that which is most alike.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from tests.benchmarks.rivals.common import Batches, blocks, cosine, put_blocks, real, run
from tests.benchmarks.rivals.dropping import few

LENGTHS = (2, 4)  # layers that become one at most (C of the paper)
APART = 2  # layers between two merges at least (I of the paper)
THRESHOLDS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5, 0.3, 0.0, -1.0)
TOKENS = 1_024  # the paper compares on a few sentences
Run = int | tuple  # a layer, or layers (merged or not) that become one
Merge = Callable[[Sequence[nn.Module]], nn.Module]


def collapsed(model: nn.Module, batches: Batches, count: int, merge: Merge) -> None:
    """Merge until `count` layers are gone."""
    some, whole = few(batches, TOKENS), list(blocks(model))
    target, known, found = last(model, some), {}, []

    def alike(runs: list[Run]) -> float:
        if tuple(runs) not in known:
            put_blocks(model, built(whole, runs, merge))
            known[tuple(runs)] = float(cosine(last(model, some), target).mean())
        return known[tuple(runs)]

    for length in LENGTHS:
        for threshold in THRESHOLDS:
            runs = chosen(len(whole), count, length, threshold, alike)
            if len(runs) == len(whole) - count:
                found.append(runs)
                break
    put_blocks(model, built(whole, max(found, key=alike), merge))


def chosen(depth: int, count: int, length: int, threshold: float, alike: Callable[[list[Run]], float]) -> list[Run]:
    """Which layers become one, at one threshold."""
    runs, left = list(range(depth)), count
    at = len(runs) - min(length, count + 1)
    while at >= 0 and left:
        number = min(length - 1, left, len(runs) - 1 - at)
        tried = [*runs[:at], tuple(runs[at : at + number + 1]), *runs[at + number + 1 :]]
        if alike(tried) > threshold:
            runs, left = tried, left - number
            at = min(max(at - APART, 0), len(runs) - min(length, left + 1))
        else:
            at -= 1
    return runs


@torch.no_grad()
def last(model: nn.Module, batches: Batches) -> Tensor:
    """(N, D) hidden states behind the last norm."""
    return torch.cat([real(batch, run(model, batch).last_hidden_state).float() for batch in batches])


def built(whole: list[nn.Module], runs: Sequence[Run], merge: Merge) -> list[nn.Module]:
    """The layers that runs of layers become."""
    return [whole[part] if isinstance(part, int) else merge(built(whole, part, merge)) for part in runs]


@torch.no_grad()
def summed(layers: Sequence[nn.Module]) -> nn.Module:
    """The first layer, the differences of all others' projections to it added."""
    one = copy.deepcopy(layers[0])
    for name, values in projections(one).items():
        for other in layers[1:]:
            values.add_(other.get_parameter(name) - layers[0].get_parameter(name))
    return one


@torch.no_grad()
def last_one(layers: Sequence[nn.Module]) -> nn.Module:
    """The first layer's norms with the last one's projections."""
    one = copy.deepcopy(layers[0])
    for name, values in projections(one).items():
        values.copy_(layers[-1].get_parameter(name))
    return one


def projections(layer: nn.Module) -> dict[str, nn.Parameter]:
    """Matrices, and biases beside them."""
    matrices = [name for name, part in layer.named_modules() if getattr(part, "weight", torch.empty(0)).dim() > 1]
    return {name: values for name, values in layer.named_parameters() if name.rpartition(".")[0] in matrices}


laco = partial(collapsed, merge=summed)
as_in_the_notebook = partial(collapsed, merge=last_one)
