"""Words of a declaration for the units along an axis, and how a file changes when units are added or removed.

q  kv  mlp             heads, key/value heads or MLP units, one after another
q+kv+kv, mlp+mlp       parts stacked one after another
heads*24, mlp*2        24 entries per head, ordered by head; 2 per unit
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
    """Return the words that may describe an axis with `per_head` entries per head and `per_kv` per key/value head.

    The likelier come first; empty if the numbers do not explain its size. Plain attention has `per_kv` 0.
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
    """Return the words that may describe an axis with `per_unit` entries per MLP unit, the likelier first."""
    return {1: ["mlp"], 2: ["mlp+mlp", "mlp*2"]}.get(per_unit, []) if per_unit * units == size else []


@dataclass(frozen=True)
class UnitPlace:
    """Where the units of an axis are: a tensor within a block, an axis, its word.

    `sink` marks the input axis of an output projection, where zeros make new units silent.
    """

    template: str
    axis: int
    word: str
    sink: bool


Places = dict[str, list[UnitPlace]]  # tensor name -> places


def move_units(
    state: Mapping[str, Tensor], at: Places, now: Stage, maps: UnitMaps, seed: int, loud: bool = False
) -> dict[str, Tensor]:
    """Return a file after units were added, removed or permuted.

    New entries are random, those of sinks zero unless `loud`.
    """
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
    """Return a file of the same sizes in which the units that are not kept have no output."""
    tensors = dict(state)
    for name, places in at.items():
        for axis, word in [(place.axis, place.word) for place in places if place.sink]:
            gone = np.setdiff1d(np.arange(state[name].shape[axis]), map_entries(word, now, kept))
            tensors[name] = tensors[name].index_fill(axis, torch.from_numpy(gone), 0)
    return tensors
