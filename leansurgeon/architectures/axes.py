"""Axes that are made of heads or MLP units: where the old entries stand when units come, go or change places."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from leansurgeon.shape import Stage

Array = np.ndarray
FRESH = -1  # in an index: this place holds nothing old


@dataclass(frozen=True)
class UnitMaps:
    """For every new head, key/value head and MLP unit the old one at its place, or FRESH."""

    heads: Array
    kv_heads: Array
    units: Array


def map_entries(axis: str, stage: Stage, maps: UnitMaps) -> Array:
    """The old place of every new entry along an axis of units (`q+kv+kv`, `heads*qkv`, `mlp*2`), stacked parts one
    after the other; FRESH where there is none. `stage` has the old sizes, and `maps` are looked at as they are needed.
    Raises `KeyError` for an axis of something else.
    """
    units = {"q": ("heads", stage.head_dim), "kv": ("kv_heads", stage.head_dim), "heads": ("heads", 1)}
    units["mlp"] = ("units", 1)
    pieces, offset = [], 0
    for part in axis.split("+"):
        unit, *factors = part.split("*")
        name, each = units[unit]
        each *= prod(int(f) if f.isdigit() else {"head_dim": 1, "qkv": 3}[f] * stage.head_dim for f in factors)
        chosen = getattr(maps, name)
        places = np.repeat(chosen, each) * each + np.tile(np.arange(each), len(chosen))
        pieces.append(np.where(np.repeat(chosen, each) == FRESH, FRESH, places + offset))
        offset += (stage.mlp_dim if name == "units" else getattr(stage, name)) * each
    return np.concatenate(pieces)


def widen(before: int, after: int) -> Array:
    """(after,) old unit of every new one, FRESH for the added ones."""
    index = np.full(after, FRESH)
    index[:before] = np.arange(before)
    return index


def map_added_heads(before: Stage, after: Stage) -> tuple[Array, Array]:
    """For every new query head and key/value head the old one at its place, or FRESH; where there are fewer heads in a
    group, its last ones go.
    """
    if before.kv_heads == before.heads:
        queries = widen(before.heads, after.heads)
        return queries, queries.copy()
    old, new = before.heads // before.kv_heads, after.heads // after.kv_heads
    groups = np.full((after.kv_heads, new), FRESH)
    groups[:, :old] = np.arange(before.heads).reshape(before.kv_heads, old)[:, :new]
    return groups.reshape(-1), np.arange(before.kv_heads)
