"""A layer's matrices in one form, whatever the file's layout, so that operators are written once. numpy only.

Files hold queries, keys and values apart or stacked, stacked part by part or head by head, with the outputs first
(Linear) or the inputs first (GPT-2's Conv1D), biases or none. `unpack` gives them head by head; `pack` is the way back
and gives the very same bits at the same shape. For token vectors x `(width,)` and head h of kv head g:

    q = attention.q[h] @ x + attention.q_bias[h]           scores: score_scale(source) * q . k, if no rotary positions
    y = sum over h of attention.o[:, h] @ (weighted mean of v) + attention.o_bias
    mlp: down @ act(up @ x + up_bias) + down_bias, or with a gate: down @ (act(gate @ x + gate_bias) * (up @ x + ...))

The gate is the half that goes through the activation, whatever its place in the file. Query and key norms, layer
scales, tables of relative positions and all else stay in `rest` as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np

from leansurgeon.architectures.base import TensorSpec
from leansurgeon.checkpoints.pieces import ATTENTION_ROLES, outer_axis, to_pieces
from leansurgeon.checkpoints.reshaped import Reshaped, within_block
from leansurgeon.checkpoints.source import Source
from leansurgeon.checkpoints.weights import Arrays
from leansurgeon.errors import UnsupportedModel

Array = np.ndarray


@dataclass(frozen=True)
class Attention:
    """The matrices of one attention, float32. A kv head serves `heads / kv_heads` neighbouring query heads."""

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
        """Size of a head."""
        return self.q.shape[1]

    @property
    def width(self) -> int:
        """Width of the residual stream."""
        return self.q.shape[2]


@dataclass(frozen=True)
class MLP:
    """The matrices of one feed-forward part, float32."""

    up: Array  # (mlp, width)
    down: Array  # (width, mlp)
    gate: Array | None = None  # (mlp, width): the half that goes through the activation
    up_bias: Array | None = None  # (mlp,)
    gate_bias: Array | None = None  # (mlp,)
    down_bias: Array | None = None  # (width,)


@dataclass(frozen=True)
class Layer:
    """One block. `rest` holds norms, QK norms and everything else by the name that the family's
    declaration gives it (`input_layernorm.weight`).
    """

    attention: Attention
    mlp: MLP
    rest: dict[str, Array] = field(default_factory=dict)


def why_unsupported(source: Source) -> str | None:
    """Why this model's blocks have no canonical form, in one sentence; None where they have."""
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
        if lacking := {"q", "k", "v"} - letters:
            return f"Stage {number + 1} of {arch.name} has attention without {names(lacking)}."
        if not {"o", "up", "down"} <= roles:
            return f"The blocks of {arch.name} lack an output projection or an MLP."
    return None


def splittable(source: Source) -> str | None:
    """Why heads of this model cannot become heads of another size, in one sentence; None where they can. For that an
    attention has to be `softmax(q k) v` over all tokens, without anything that is learned for a head besides its
    matrices, and the library has to call its projections as modules, so that what they read can be seen.
    """
    if reason := why_unsupported(source):
        return reason
    arch, config = source.architecture, source.architecture.flat(source.config)
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


def names(letters: set[str]) -> str:
    """The words for some of q, k, v."""
    words = {"q": "queries", "k": "keys", "v": "values"}
    return " and ".join(words[x] for x in "qkv" if x in letters)


def score_scale(source: Source, stage: int = 0) -> float:
    """What multiplies q . k before the softmax: 1/sqrt(head_dim), unless a config key says otherwise.

    Raises `UnsupportedModel` where the scores are no multiple of q . k that is the same in every layer.
    """
    arch = source.architecture
    config = arch.flat(source.config)
    if key := next((key for key in arch.depends_on_index if config.get(key)), None):
        raise UnsupportedModel(f"This model's config sets {key}: every layer has a score scale of its own.")
    if config.get("attn_logit_softcapping"):
        raise UnsupportedModel("This model caps its scores (attn_logit_softcapping), which no change of q and k keeps.")
    scale = arch.score_scale(config)
    return source.shape.stages[stage].head_dim ** -0.5 if scale is None else scale


def scale_is_derived(source: Source) -> bool:
    """Whether the library takes the score scale from head_dim, so that it changes when head_dim does."""
    arch = source.architecture
    return arch.score_scale(arch.flat(source.config)) is None


def rotary(source: Source) -> bool:
    """Whether positions rotate queries and keys, so that a change of basis within a head is not free."""
    arch = source.architecture
    return arch.positions.startswith("rope") or bool(arch.flat(source.config).get(arch.rotates_when))


# -- from the file ---------------------------------------------------------------------------------


def unpack(source: Source, layer: int) -> Layer:
    """Layer `layer` of a source, counted through all stages. Raises `UnsupportedModel` where `why_unsupported` has a
    reason.
    """
    if reason := why_unsupported(source):
        raise UnsupportedModel(reason)
    if source.weights is None:
        raise UnsupportedModel(f"{source.name} has no weights to read.", "A preset is an architecture only.")
    specs = [s for s in source.specs if s.layer == layer]
    stage = source.shape.stages[specs[0].stage]
    pieces_by_name: dict[str, Array] = {}
    rest: dict[str, Array] = {}
    for spec in specs:
        values = source.weights.float32(spec.name)
        pieces = to_pieces(spec, values, stage)
        if pieces is None:
            rest[within_block(spec, source.architecture)] = values
        else:
            pieces_by_name |= {key: np.ascontiguousarray(piece) for key, piece in pieces.items()}
    return Layer(
        *(kind(**{f.name: pieces_by_name.get(f.name) for f in fields(kind)}) for kind in (Attention, MLP)), rest
    )


# -- and back --------------------------------------------------------------------------------------


def pack(layer: Layer, target: Reshaped, index: int) -> Arrays:
    """File tensors (float32, by name) of layer `index` of a model at another shape.

    Raises `UnsupportedModel` where the result has no place for something (a bias, the norm of a layer that becomes the
    first) or asks for something that the layer does not have.
    """
    specs, architecture = target.by_layer[index], target.architecture
    have = {f.name: getattr(part, f.name) for part in (layer.attention, layer.mlp) for f in fields(part)}
    stage, out, used = target.shape.stages[specs[0].stage], {}, set()
    for spec in specs:
        keys = to_pieces(spec, np.broadcast_to(np.float32(0), spec.shape), stage)
        if keys is None:
            name = within_block(spec, architecture)
            if name not in layer.rest:
                raise UnsupportedModel(f"Layer {index} of the result needs '{spec.name}', which this layer lacks.")
            values, used = layer.rest[name], used | {name}
        else:
            values, used = to_file(spec, {key: have[key] for key in keys}, keys), used | set(keys)
        if values.shape != spec.shape:
            raise UnsupportedModel(
                f"'{spec.name}' of the result is {list(spec.shape)}, and the layer gives {list(values.shape)}."
            )
        out[spec.name] = np.ascontiguousarray(values, np.float32)
    left = [key for key, value in (have | layer.rest).items() if value is not None and key not in used]
    # A bias of zeros says nothing and needs no place.
    left = [key for key in left if not key.endswith("_bias") or np.any(have[key])]
    if left:
        raise UnsupportedModel(f"Layer {index} of a {architecture.name} has no place for '{left[0]}'.")
    return out


def to_file(spec: TensorSpec, parts: dict[str, Array | None], like: dict[str, Array]) -> Array:
    """Canonical fields in the layout of one file tensor; `like` are arrays of their sizes without memory."""
    if all(value is None for key, value in parts.items() if not key.endswith("_bias")) and len(spec.axes) > 1:
        raise UnsupportedModel(f"The result needs '{spec.name}', and the layer has no {' or '.join(parts)}.")
    pieces = [np.zeros_like(like[key]) if value is None else value for key, value in parts.items()]
    if spec.role == "o" or spec.role == "down":
        if len(spec.axes) == 1:
            return pieces[0]
        flat = pieces[0].reshape(pieces[0].shape[0], -1)
        return np.moveaxis(flat, 0, spec.axes.index("width"))
    at = outer_axis(spec)
    if spec.axes[at] == "heads*qkv":
        each = np.stack(pieces, axis=1)  # (heads, 3, head_dim, ...)
        rows = each.reshape(-1, *each.shape[3:])
    else:
        heads = 2 if spec.role in ATTENTION_ROLES else 1  # leading dimensions that become one
        rows = np.concatenate([piece.reshape(-1, *piece.shape[heads:]) for piece in pieces])
    return np.moveaxis(rows, 0, at)
