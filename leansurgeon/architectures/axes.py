"""Index maps of axes that are made of heads or MLP units: the old position of every entry when units change."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from leansurgeon.shape import Stage

Array = np.ndarray
FRESH = -1  # in an index: the entry is new


@dataclass(frozen=True)
class UnitMaps:
    """The old index of every new head, key/value head and MLP unit, or FRESH."""

    heads: Array
    kv_heads: Array
    units: Array


def map_entries(axis: str, stage: Stage, maps: UnitMaps) -> Array:
    """Return the old position of every new entry along an axis of units (`q+kv+kv`, `heads*qkv`, `mlp*2`), or FRESH.

    Stacked parts follow one another. `stage` has the old sizes; only the needed `maps` are read. Raises `KeyError` for
    an axis of anything else.
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
    """Return the old index of every new unit, shape (after,); FRESH for the added ones."""
    index = np.full(after, FRESH)
    index[:before] = np.arange(before)
    return index


def map_added_heads(before: Stage, after: Stage) -> tuple[Array, Array]:
    """Return the old index of every new query head and of every new key/value head, or FRESH.

    If a group has fewer heads than before, its last ones are dropped.
    """
    if before.kv_heads == before.heads:
        queries = widen(before.heads, after.heads)
        return queries, queries.copy()
    old, new = before.heads // before.kv_heads, after.heads // after.kv_heads
    groups = np.full((after.kv_heads, new), FRESH)
    groups[:, :old] = np.arange(before.heads).reshape(before.kv_heads, old)[:, :new]
    return groups.reshape(-1), np.arange(before.kv_heads)
