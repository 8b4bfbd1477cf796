"""What the units along an axis are, in the words of a declaration, and how a file is filled when units come and go.

q  kv  mlp             heads, key/value heads or MLP units after one another
q+kv+kv, mlp+mlp       parts stacked one after the other
heads*24, mlp*2        24 entries for every head, head by head; 2 for every unit
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from leansurgeon.architectures.axes import FRESH, UnitMaps, map_entries
from leansurgeon.shape import Stage


def head_words(size: int, per_head: int, per_kv: int, now: Stage) -> list[str]:
    """What an axis may be that has `per_head` entries for every head and `per_kv` for every key/value head, the
    likelier first; empty where the numbers do not explain its size. Plain attention has `per_kv` 0.
    """
    d = now.head_dim
    if per_head * now.heads + per_kv * now.kv_heads != size:
        return []
    known = {
        (d, 0): ["q"],
        (0, d): ["kv"],
        (d, d): ["q+kv"],
        (d, 2 * d): ["q+kv+kv"],
        (0, 2 * d): ["kv+kv"],
        (1, 0): ["heads"],
        (2 * d, 0): ["heads*2*head_dim", "q+q"],
    }
    if now.kv_heads == now.heads:
        known |= {(3 * d, 0): ["q+kv+kv", "heads*qkv"], (2 * d, 0): ["kv+kv", "heads*2*head_dim"]}
    return known.get((per_head, per_kv), [] if per_kv else [f"heads*{per_head}"])


def mlp_words(size: int, per_unit: int, units: int) -> list[str]:
    """What an axis may be that has `per_unit` entries for every MLP unit, the likelier first."""
    return {1: ["mlp"], 2: ["mlp+mlp", "mlp*2"]}.get(per_unit, []) if per_unit * units == size else []


@dataclass(frozen=True)
class UnitPlace:
    """Where the units of an axis stand: a tensor within a block, an axis, its word; `sink` where what the units say
    enters the stream (an output projection), so that zeros there make new units silent.
    """

    template: str
    axis: int
    word: str
    sink: bool


Places = dict[str, list[UnitPlace]]  # by the name of the tensor


def move_units(
    state: Mapping[str, Tensor], at: Places, now: Stage, maps: UnitMaps, seed: int, loud: bool = False
) -> dict[str, Tensor]:
    """A file after units came, went or changed places. New entries are random, those of sinks zero unless `loud`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = dict(state)
    for name, places in at.items():
        picks = [np.arange(size) for size in state[name].shape]
        for place in places:
            picks[place.axis] = map_entries(place.word, now, maps)
        shape = [len(pick) for pick in picks]
        silent = any(place.sink for place in places) and not loud
        new = torch.zeros(shape) if silent else 0.1 * torch.randn(shape, generator=generator)
        old = state[name].float()[np.ix_(*(pick[pick != FRESH] for pick in picks))]
        new[np.ix_(*(np.flatnonzero(pick != FRESH) for pick in picks))] = old
        tensors[name] = new
    return tensors


def silence_units(state: Mapping[str, Tensor], at: Places, now: Stage, kept: UnitMaps) -> dict[str, Tensor]:
    """A file of the same sizes in which the units that are not kept say nothing."""
    tensors = dict(state)
    for name, places in at.items():
        for axis, word in [(place.axis, place.word) for place in places if place.sink]:
            gone = np.setdiff1d(np.arange(state[name].shape[axis]), map_entries(word, now, kept))
            tensors[name] = tensors[name].index_fill(axis, torch.from_numpy(gone), 0)
    return tensors
