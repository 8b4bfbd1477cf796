"""One canonical form for the matrices of an attention, whatever the file's layout, so each operator is written once.
Uses numpy only.

Files hold queries, keys and values apart or stacked, stacked part by part or head by head, outputs first (Linear) or
inputs first (GPT-2's Conv1D), with or without biases. `unpack` returns them head by head; `pack` is the inverse, bit
for bit at the same shape. For token vectors x `(width,)` and head h of kv head g:

    q = attention.q[h] @ x + attention.q_bias[h]           scores: score_scale(source) * q . k, if no rotary positions
    y = sum over h of attention.o[:, h] @ (weighted mean of v) + attention.o_bias
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from leansurgeon.architectures.base import TensorSpec
from leansurgeon.checkpoints.pieces import ATTENTION_ROLES, outer_axis, to_pieces
from leansurgeon.checkpoints.source import Source
from leansurgeon.checkpoints.weights import Arrays
from leansurgeon.errors import UnsupportedModel
from leansurgeon.shape import Stage

Array = np.ndarray
ROLES = (*ATTENTION_ROLES, "o")


@dataclass(frozen=True)
class Attention:
    """The matrices of one attention, float32. Each kv head serves `heads / kv_heads` adjacent query heads."""

    q: Array  # (heads, head_dim, width)
    k: Array  # (kv_heads, head_dim, width)
    v: Array  # (kv_heads, head_dim, width)
    o: Array  # (width, heads, head_dim)
    q_bias: Array | None = None  # (heads, head_dim)
    k_bias: Array | None = None  # (kv_heads, head_dim)
    v_bias: Array | None = None  # (kv_heads, head_dim)
    o_bias: Array | None = None  # (width,)

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.q.shape[0]

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.k.shape[0]

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.q.shape[1]

    @property
    def width(self) -> int:
        """Width of the residual stream."""
        return self.q.shape[2]


def why_unsupported(source: Source) -> str | None:
    """Return in one sentence why this model's blocks have no canonical form; None if they have one."""
    arch = source.architecture
    if arch.heads_entangled:
        return f"{arch.name} {arch.heads_entangled}."
    for number in range(len(source.shape.stages)):
        inside = [s for s in source.specs if s.layer is not None and s.stage == number]
        roles = {s.role for s in inside}
        if "head_mix" in roles:
            return f"{arch.name} mixes its heads with each other (talking heads), so no head stands alone."
        if len({s.group for s in inside if s.role in (*ATTENTION_ROLES, "vkq")}) > 1 or "vkq" in roles:
            return f"{arch.name} has several attentions in a block."
        letters = {letter for role in roles if role in ATTENTION_ROLES for letter in role}
        words = {"q": "queries", "k": "keys", "v": "values"}
        if lacking := [word for letter, word in words.items() if letter not in letters]:
            return f"Stage {number + 1} of {arch.name} has attention without {' and '.join(lacking)}."
        if not {"o", "up", "down"} <= roles:
            return f"The blocks of {arch.name} lack an output projection or an MLP."
    return None


def splittable(source: Source) -> str | None:
    """Return in one sentence why heads of this model cannot be split into smaller ones; None if they can. Splitting
    needs `softmax(q k) v` attention over all tokens, with nothing learned per head except its matrices, and projections
    that the library calls as modules, so that hooks see their inputs.
    """
    if reason := why_unsupported(source):
        return reason
    arch, config = source.architecture, source.flat_config
    roles = {s.role for s in source.specs if s.layer is not None}
    if "head_param" in roles:
        return (
            f"{arch.name} has parameters of every head besides q, k, v and o (such as a table of relative positions)."
        )
    if "qk_norm_all" in roles:
        return f"{arch.name} normalises queries and keys, over the channels of all heads together."
    if "qk_norm" in roles or config.get("qk_norm"):
        return f"{arch.name} normalises queries and keys, each over the entries of a head."
    if any(s.role in (*ATTENTION_ROLES, "o") for s in source.specs if s.layer is None):
        return f"{arch.name} has an attention outside its blocks, whose heads would have to follow."
    if arch.heads_unsplittable:
        return f"{arch.name} {arch.heads_unsplittable}."
    if any(config.get(key) for key in ("window_size", "sliding_window", "local_attention")):
        return f"The attention of {arch.name} sees a window of the tokens, not all of them."
    return None


def score_scale(source: Source, stage: Stage) -> float:
    """Return the factor of q . k before the softmax: 1/sqrt(head_dim), unless a config key says otherwise.

    Raises `UnsupportedModel` if scores are not q . k times one factor that is the same in every layer.
    """
    arch = source.architecture
    config = source.flat_config
    if key := next((key for key in arch.depends_on_index if config.get(key)), None):
        raise UnsupportedModel(f"This model's config sets {key}: every layer has a score scale of its own.")
    if config.get("attn_logit_softcapping"):
        raise UnsupportedModel("This model caps its scores (attn_logit_softcapping), which no change of q and k keeps.")
    scale = arch.score_scale(config)
    return stage.head_dim**-0.5 if scale is None else scale


def score_gain(source: Source, before: Stage, after: Stage) -> float:
    """Return the old score scale over the new one; 1 unless the library derives the scale from head_dim."""
    arch = source.architecture
    derived = arch.score_scale(source.flat_config) is None
    return float(np.sqrt(after.head_dim / before.head_dim)) if derived else 1.0


def rotary(source: Source) -> bool:
    """Return whether positions rotate queries and keys, which restricts the change of basis within a head."""
    arch = source.architecture
    return arch.positions.startswith("rope") or bool(source.flat_config.get(arch.rotates_when))


# -- from the file and back ------------------------------------------------------------------------


def of_attention(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Return the attention tensors of the blocks."""
    return [s for s in specs if s.layer is not None and s.role in ROLES]


def unpack(specs: Iterable[TensorSpec], stage: Stage, read: Callable[[str], Array]) -> Attention:
    """Return the attention held by these tensors; `read` returns a tensor in float32 by name."""
    pieces = {}
    for spec in specs:
        pieces |= to_pieces(spec, read(spec.name), stage)
    return Attention(**{key: np.ascontiguousarray(piece) for key, piece in pieces.items()})


def pack(attention: Attention, specs: Iterable[TensorSpec]) -> Arrays:
    """Return the tensors that hold an attention, in float32 by name, each in its file layout."""
    tensors = {}
    for spec in specs:
        if len(spec.axes) == 1 and spec.role == "o":
            rows = attention.o_bias
        elif spec.role == "o":
            rows = np.moveaxis(attention.o.reshape(attention.width, -1), 0, spec.axes.index("width"))
        else:
            end, at = "" if len(spec.axes) > 1 else "_bias", outer_axis(spec)
            pieces = [getattr(attention, letter + end) for letter in spec.role]  # (heads, head_dim, ...)
            if spec.axes[at] == "heads*qkv":
                each = np.stack(pieces, axis=1)  # (heads, 3, head_dim, ...)
                rows = each.reshape(-1, *each.shape[3:])
            else:
                rows = np.concatenate([piece.reshape(-1, *piece.shape[2:]) for piece in pieces])
            rows = np.moveaxis(rows, 0, at)
        tensors[spec.name] = np.ascontiguousarray(rows, np.float32)
    return tensors


class LayerTensors:
    """Tensors of new layers in float32. `make` computes those of one layer when its first tensor is requested."""

    def __init__(self, specs: Iterable[TensorSpec], make: Callable[[int], Arrays]) -> None:
        self.layers = {spec.name: spec.layer for spec in specs}
        self.layer = lru_cache(maxsize=1)(make)

    def __contains__(self, name: object) -> bool:
        return name in self.layers

    def __getitem__(self, name: str) -> Array:
        return self.layer(self.layers[name])[name]
