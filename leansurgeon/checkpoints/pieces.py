"""Convert tensors of an attention or MLP to one canonical form, whatever the file's layout. Imports numpy only."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from leansurgeon.architectures.tensors import TensorSpec
from leansurgeon.shape import Stage

Array = np.ndarray
Pieces: TypeAlias = dict[str, np.ndarray]  # keys are fields of `Attention` or `MLP`
ATTENTION_ROLES = ("q", "k", "v", "qk", "qkv")


def to_pieces(spec: TensorSpec, values: Array, stage: Stage) -> Pieces | None:
    """Return the canonical fields that a tensor of a file holds; None if it holds none (a norm)."""
    end = "" if len(spec.axes) > 1 else "_bias"
    if spec.role in ATTENTION_ROLES:
        return {x + end: piece for x, piece in zip(spec.role, by_head(spec, values, stage), strict=True)}
    if spec.role == "o":
        if end:
            return {"o_bias": values}
        return {"o": np.moveaxis(values, spec.axes.index("width"), 0).reshape(-1, stage.heads, stage.head_dim)}
    return None


def outer_axis(spec: TensorSpec) -> int:
    """Return the axis that indexes heads or units."""
    return next(i for i, axis in enumerate(spec.axes) if axis != "width")


def by_head(spec: TensorSpec, values: Array, stage: Stage) -> list[Array]:
    """Return one array `(heads, head_dim, ...)` for every letter of a tensor's role."""
    at = outer_axis(spec)
    rows = np.moveaxis(values, at, 0)
    if spec.axes[at] == "heads*qkv":
        each = rows.reshape(stage.heads, 3, stage.head_dim, *rows.shape[1:])
        return [each[:, i] for i in range(3)]
    pieces, start = [], 0
    for part in spec.axes[at].split("+"):
        heads = {"q": stage.heads, "kv": stage.kv_heads}[part]
        end = start + heads * stage.head_dim
        pieces.append(rows[start:end].reshape(heads, stage.head_dim, *rows.shape[1:]))
        start = end
    return pieces
