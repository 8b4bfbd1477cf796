"""Add, split or trim whole heads of the same size: which old head stands at which place.

Adding is exact: a new head has random queries, keys and values, and zero columns in the output projection, so it says
nothing until it is trained (Gesmundo & Maile, arXiv 2308.06103). Within grouped attention, new query heads join the
existing groups and the key/value heads stay.

Splitting is exact, too: every child has its parent's queries, keys and values, and the parent's columns of the output
projection are divided among the children. In grouped attention the key/value heads stay, so the cache does not grow.
Slices that differ give the children different gradients from the first step (equal halves would not: LEMON, arXiv
2310.07999).
"""

from __future__ import annotations

import numpy as np

from leansurgeon.checkpoints.recorded.planned import Step
from leansurgeon.errors import UsageError, plural
from leansurgeon.shape import Stage, nearest_divisible

FRESH = -1  # in an index: this place holds nothing old


def add_map(before: Stage, after: Stage) -> tuple[np.ndarray, np.ndarray]:
    """For every new query head and key/value head the old one at its place, or FRESH."""
    if before.kv_heads == before.heads:
        queries = np.full(after.heads, FRESH)
        queries[: before.heads] = np.arange(before.heads)
        return queries, queries.copy()
    old, new = before.heads // before.kv_heads, after.heads // after.kv_heads
    groups = np.full((after.kv_heads, new), FRESH)
    groups[:, :old] = np.arange(before.heads).reshape(before.kv_heads, old)
    return groups.reshape(-1), np.arange(before.kv_heads)


def split_map(before: Stage, after: Stage) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The parent of every new query head and key/value head, and the old column of every new output column, or FRESH
    (zero) where it belongs to a sibling.
    """
    children, d = after.heads // before.heads, before.head_dim
    queries = np.repeat(np.arange(before.heads), children)
    plain = before.kv_heads == before.heads
    values = queries.copy() if plain else np.arange(before.kv_heads)
    columns = np.arange(d)[None] + queries[:, None] * d
    owner = np.arange(d) * children // d  # slices of nearly the same size
    mine = owner[None] == np.tile(np.arange(children), before.heads)[:, None]
    return queries, values, np.where(mine, columns, FRESH).reshape(-1)


def trim_map(before: Stage, after: Stage, strength: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The strongest heads by `strength` (one number a head), in their old order: as many from every key/value group, or
    the strongest groups whole where their number changes (a head with keys of its own is a group).
    """
    per_group = strength.reshape(before.kv_heads, -1)
    if after.kv_heads != before.kv_heads:
        groups = np.sort(np.argsort(-per_group.sum(1), kind="stable")[: after.kv_heads])
        return (groups[:, None] * per_group.shape[1] + np.arange(per_group.shape[1])).reshape(-1), groups
    best = np.sort(np.argsort(-per_group, axis=1, kind="stable")[:, : after.heads // after.kv_heads], axis=1)
    return (best + np.arange(before.kv_heads)[:, None] * per_group.shape[1]).reshape(-1), np.arange(before.kv_heads)


def strength(output: np.ndarray, heads: int) -> np.ndarray:
    """Norm of every head's slice of the output projection; `output` is `(width, heads * head_dim)`."""
    return np.linalg.norm(output.reshape(output.shape[0], heads, -1), axis=(0, 2))


def check_split(before: Stage, after: Stage) -> None:
    """Raises `UsageError` where heads cannot be split into whole children."""
    if after.heads % before.heads:
        near = nearest_divisible(after.heads, before.heads)
        raise UsageError(f"{before.heads} heads cannot be split into {after.heads}; nearest: {near}.", "Or add heads.")
    if after.heads // before.heads > before.head_dim:
        raise UsageError(f"Heads of {before.head_dim} have no {after.heads // before.heads} children.")


def operator(
    before: Stage, after: Stage, more: str = "add", *, calibrated: bool = False, by: str | None = None
) -> Step:
    """`by` says in words what chooses the heads that stay."""
    settings = {"before": before.heads, "after": after.heads, "head_dim": after.head_dim, "kv_heads": after.kv_heads}
    if after.heads > before.heads and more == "split":
        check_split(before, after)
        shared = "" if before.kv_heads == before.heads else f"; the {before.kv_heads} key/value heads stay"
        says = f"split every head into {after.heads // before.heads}, which share its output columns{shared}"
        return Step("split-heads", "exact", says, settings)
    if after.heads > before.heads:
        shared = "" if before.kv_heads == before.heads else f", the {before.kv_heads} key/value heads stay"
        says = f"add {plural(after.heads - before.heads, 'head')} of {after.head_dim} with zero output columns{shared}"
        return Step("add-heads", "exact", says, settings)
    by = by or ("of most use on the calibration data" if calibrated else "with the largest output projection")
    return Step("trim-heads", "near", f"keep the {plural(after.heads, 'head')} {by}", settings)


def split_operator(before: Stage, after: Stage, *, calibrated: bool) -> Step:
    """Heads become several of another size (`split_heads`)."""
    settings = {"before": [before.heads, before.head_dim], "after": [after.heads, after.head_dim]}
    pair = f"{before.heads} heads of {before.head_dim} become {after.heads} of {after.head_dim}"
    if after.head_dim >= before.head_dim:
        return Step("split-heads", "exact", f"{pair}, each with the scores of its parent", settings)
    by = "fitted to the calibration data" if calibrated else "from the weights alone"
    return Step("split-heads", "near", f"{pair}, {by}", settings | {"calibrated": calibrated})
