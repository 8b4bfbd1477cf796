"""LaCo (arXiv 2402.11187): runs of layers merge into their first by the sum of the differences to it, from the last
layers on, where the model's last hidden states stay alike.

The paper sets a threshold of the cosine and takes what number of layers results. Here the number is given: of the
thresholds tried, the highest that reaches it counts, and the last run is as short as it has to be.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from tests.benchmarks.rivals.common import Batches, blocks, cosine, put_blocks, seen
from tests.benchmarks.rivals.dropping import few

MERGED = 4  # layers that become one at most (C of the paper)
APART = 2  # layers between two merges at least (I of the paper)
Run = int | tuple  # a layer, or layers (merged or not) that become one
THRESHOLDS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5, 0.3, 0.0, -1.0)
TOKENS = 1_024  # the paper compares on a few sentences


def laco(model: nn.Module, batches: Batches, count: int) -> None:
    some = few(batches, TOKENS)
    target = last(model, some)
    whole, known = list(blocks(model)), {}
    for threshold in THRESHOLDS:
        runs = collapse(model, whole, some, target, count, threshold, known)
        if len(runs) == len(whole) - count:
            break
    put_blocks(model, built(whole, runs))


def last(model: nn.Module, batches: Batches) -> Tensor:
    """The hidden states behind the last block."""
    return seen(model, batches, {"end": (blocks(model)[-1], "out")})["end"]


def collapse(
    model: nn.Module,
    whole: list[nn.Module],
    batches: Batches,
    target: Tensor,
    count: int,
    threshold: float,
    known: dict[tuple, float],
) -> list[Run]:
    """Which layers become one, at one threshold; what a set of runs gave once is `known`."""
    runs, left = list(range(len(whole))), count
    at = len(runs) - 2
    while at >= 0 and left:
        number = min(MERGED - 1, left, len(runs) - 1 - at)
        tried = [*runs[:at], tuple(runs[at : at + number + 1]), *runs[at + number + 1 :]]
        if tuple(tried) not in known:
            put_blocks(model, built(whole, tried))
            known[tuple(tried)] = float(cosine(last(model, batches), target).mean())
        if known[tuple(tried)] > threshold:
            runs, left = tried, left - number
            at -= APART
        else:
            at -= 1
    return runs


def built(whole: list[nn.Module], runs: list[Run]) -> list[nn.Module]:
    """The layers that runs of layers become."""
    return [whole[run] if isinstance(run, int) else merged(built(whole, list(run))) for run in runs]


@torch.no_grad()
def merged(run: list[nn.Module]) -> nn.Module:
    """The first layer with the differences of all others to it added."""
    one = copy.deepcopy(run[0])
    for name, values in one.named_parameters():
        first = run[0].get_parameter(name)
        for other in run[1:]:
            values.add_(other.get_parameter(name) - first)
    return one
