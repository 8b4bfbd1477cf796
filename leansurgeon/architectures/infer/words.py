"""What the units along an axis are, in the words of a declaration, and how an axis is filled when units come and go.

q  kv  mlp             heads, key/value heads or MLP units after one another
q+kv+kv, mlp+mlp       parts stacked one after the other
heads*24, mlp*2        24 entries for every head, head by head; 2 for every unit
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

FRESH = -1


@dataclass(frozen=True)
class StageNumbers:
    """The numbers of a stage that units follow."""

    heads: int
    kv_heads: int
    head_dim: int
    mlp: int


def head_words(size: int, per_head: int, per_kv: int, now: StageNumbers) -> list[str]:
    """What an axis may be that has `per_head` entries for every head and `per_kv` for every key/value head, the
    likelier first; empty where the numbers do not explain its size. Plain attention has `per_kv` 0.
    """
    d = now.head_dim
    if per_head * now.heads + per_kv * now.kv_heads != size:
        return []
    if now.kv_heads == now.heads and not per_kv:
        known = {d: ["q"], 3 * d: ["q+kv+kv", "heads*qkv"], 2 * d: ["kv+kv", "heads*2*head_dim"], 1: ["heads"]}
        return known.get(per_head, [f"heads*{per_head}"])
    known = {
        (d, 0): ["q"],
        (0, d): ["kv"],
        (d, d): ["q+kv"],
        (d, 2 * d): ["q+kv+kv"],
        (0, 2 * d): ["kv+kv"],
        (1, 0): ["heads"],
        (2 * d, 0): ["heads*2*head_dim", "q+q"],
    }
    return known.get((per_head, per_kv), [f"heads*{per_head}"] if not per_kv else [])


def mlp_words(size: int, per_unit: int, now: StageNumbers) -> list[str]:
    if per_unit * now.mlp != size:
        return []
    return {1: ["mlp"], 2: ["mlp+mlp", "mlp*2"]}.get(per_unit, [])


@dataclass(frozen=True)
class Maps:
    """For every new head, key/value head and MLP unit the old one at its place, or FRESH."""

    heads: Tensor
    kv_heads: Tensor
    units: Tensor


def origin(word: str, now: StageNumbers, maps: Maps) -> Tensor:
    """The old entry at every new place along an axis, FRESH where there is none."""
    pieces, offset = [], 0
    for part in word.split("+"):
        index, size = _part(part, now, maps)
        pieces.append(torch.where(index == FRESH, FRESH, index + offset))
        offset += size
    return torch.cat(pieces)


def _part(word: str, now: StageNumbers, maps: Maps) -> tuple[Tensor, int]:
    if word == "mlp":
        return maps.units, now.mlp
    if word.startswith("mlp*"):
        each = int(word[4:])
        return entries(maps.units, each), now.mlp * each
    chosen, count, each = maps.heads, now.heads, now.head_dim
    if word == "kv":
        chosen, count = maps.kv_heads, now.kv_heads
    elif word != "q":
        sizes = {"head_dim": now.head_dim, "qkv": 3 * now.head_dim}
        each = prod(int(f) if f.isdigit() else sizes[f] for f in word.split("*")[1:])
    return entries(chosen, each), count * each


def entries(chosen: Tensor, each: int) -> Tensor:
    """A map of units as a map of their entries, `each` a unit, side by side."""
    places = chosen[:, None] * each + torch.arange(each)
    return torch.where(chosen[:, None] == FRESH, FRESH, places).reshape(-1)


def same(now: StageNumbers) -> Maps:
    return Maps(torch.arange(now.heads), torch.arange(now.kv_heads), torch.arange(now.mlp))


@dataclass(frozen=True)
class UnitPlace:
    """Where the units of an axis stand: a tensor within a block, an axis, its word; `sink` where what the units say
    enters the stream (an output projection), so that zeros there make new units silent.
    """

    template: str
    axis: int
    word: str
    sink: bool


def move_units(
    state: Mapping[str, Tensor],
    at: Mapping[str, list[UnitPlace]],
    now: StageNumbers,
    maps: Maps,
    seed: int,
    loud: bool = False,
) -> dict[str, Tensor]:
    """A file after units came, went or changed places. `at` gives the places by tensor name. New entries are random,
    those of sinks zero unless `loud`.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = dict(state)
    for name, places in at.items():
        old = state[name]
        picks = {place.axis: origin(place.word, now, maps) for place in places}
        shape = [len(picks[a]) if a in picks else size for a, size in enumerate(old.shape)]
        silent = any(place.sink for place in places) and not loud
        new = torch.zeros(shape) if silent else 0.1 * torch.randn(shape, generator=generator)
        to = [torch.nonzero(picks[a] != FRESH)[:, 0] if a in picks else torch.arange(n) for a, n in enumerate(shape)]
        of = [picks[a][to[a]] if a in picks else to[a] for a in range(len(shape))]
        new[torch.meshgrid(*to, indexing="ij")] = old.float()[torch.meshgrid(*of, indexing="ij")]
        tensors[name] = new
    return tensors


def silence_units(
    state: Mapping[str, Tensor], at: Mapping[str, list[UnitPlace]], now: StageNumbers, kept: Maps
) -> dict[str, Tensor]:
    """A file of the same sizes in which the units that are not kept say nothing."""
    tensors = dict(state)
    for name, places in at.items():
        for place in places:
            if place.sink:
                stays = torch.zeros(state[name].shape[place.axis])
                stays[origin(place.word, now, kept)] = 1
                shape = [-1 if a == place.axis else 1 for a in range(state[name].dim())]
                tensors[name] = tensors[name] * stays.reshape(shape)
    return tensors


def choices(options: Mapping[str, list[str]]) -> Iterator[dict[str, str]]:
    """One word for every tensor: the first of each, then the second of each, and so on."""
    most = max((len(words) for words in options.values()), default=0)
    for i in range(most):
        yield {name: words[min(i, len(words) - 1)] for name, words in options.items()}
