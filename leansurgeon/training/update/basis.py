"""Moving kappa in a training without moving heads: another basis for every head's values, every so often, or
W + lambda I or sharper attention at the start. For experiments that ask whether kappa itself matters.

`change` leaves the function as it is (up to rounding) and changes what the optimizer sees: its running moments keep
the coordinates of the old basis, as they would after any other change of weights. Weights that processes share
(fsdp2), moving averages and adapters are refused, since each of them holds the weights in another form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from leansurgeon.architectures.base import TensorSpec
from leansurgeon.architectures.tensors import QK_NORMS
from leansurgeon.checkpoints.model import Loaded
from leansurgeon.checkpoints.pieces import Array, outer_axis, to_pieces
from leansurgeon.errors import UsageError
from leansurgeon.measure.kappa import attentions
from leansurgeon.measure.kappa.basis import Pair, balance, skew
from leansurgeon.training.recipe.settings import Basis, Train


@dataclass(frozen=True)
class Pieces:
    """One attention in float64: `q` (heads, head_dim, width), `v` (kv_heads, head_dim, width), `o` (width, heads,
    head_dim); biases of q and v without a width, where there are any. All are views of `buffers`, which have the
    tensors' own layout.
    """

    q: Array
    v: Array
    o: Array
    q_bias: Array | None
    v_bias: Array | None
    buffers: dict[str, Array]


def check(train: Train, loaded: Loaded, *, sharing: bool) -> None:
    """Raises `UsageError` where the basis of heads cannot be changed in this training."""
    wanted = {"basis": train.basis is not None, "identity": train.identity != 0, "sharpen": train.sharpen != 1}
    if not any(wanted.values()):
        return
    key = f"train.{next(name for name, is_wanted in wanted.items() if is_wanted)}"
    other = next((name for name in ("ema", "lora") if getattr(train, name)), "parallel: fsdp2" if sharing else None)
    if other:
        raise UsageError(f"{key} does not go together with train.{other}.", "Leave one of the two out.")
    if key == "train.sharpen" and any(tensor.role in QK_NORMS for tensor in loaded.architecture.tensors(loaded.config)):
        raise UsageError("train.sharpen does nothing here: this model's queries are normalised.", f"Leave {key} out.")
    attentions.require(loaded, key)


def change(loaded: Loaded, wanted: Basis) -> None:
    """Give the values of every head the basis that is wanted; the model computes what it did before."""

    def pair(left: Array, right: Array) -> Pair:
        return balance(left, right) if wanted.kind == "balance" else skew(left, right, wanted.kappa)

    def turn(held: Pieces) -> None:
        kv_heads, head_dim, _ = held.v.shape
        each = held.o.shape[1] // kv_heads
        for group in range(kv_heads):
            heads = slice(group * each, (group + 1) * each)
            outputs = held.o[:, heads]
            turned = pair(outputs.reshape(-1, head_dim), held.v[group])
            if turned.basis is not None:
                held.o[:, heads] = turned.left.reshape(outputs.shape)
                held.v[group] = turned.right
                if held.v_bias is not None:
                    held.v_bias[group] = turned.basis @ held.v_bias[group]

    _for_every_attention(loaded, turn)


def add_identity(loaded: Loaded, scale: float) -> None:
    """W_v + scale * I and W_o + scale * I in every block, the identity as wide as the matrix allows. It changes what
    the model computes, so it belongs before the first step. With grouped attention the groups have their own rows of
    the identity.
    """

    def add(held: Pieces) -> None:
        values, outputs = held.v.reshape(-1, held.v.shape[2]), held.o.reshape(held.o.shape[0], -1)
        for matrix in (values, outputs):
            matrix += scale * np.eye(*matrix.shape)
        held.v[...], held.o[...] = values.reshape(held.v.shape), outputs.reshape(held.o.shape)

    _for_every_attention(loaded, add)


def sharpen(loaded: Loaded, factor: float) -> None:
    """Queries, and so scores, times `factor`. Attention that is nearly even has rows that are nearly alike, so kappa is
    high at the start; sharper attention has a lower one with the same heads and parameters. It changes what the model
    computes, so it belongs before the first step.
    """

    def scale(held: Pieces) -> None:
        held.q[...] *= factor
        if held.q_bias is not None:
            held.q_bias[...] *= factor

    _for_every_attention(loaded, scale)


def _for_every_attention(loaded: Loaded, alter: Callable[[Pieces], None]) -> None:
    """Let `alter` write into every attention, and the model have what it wrote."""
    state = loaded.model.state_dict()
    for attention in attentions.of(loaded):
        held = _pieces(attention, state)
        alter(held)
        with torch.no_grad():
            for name, values in held.buffers.items():
                state[name].copy_(torch.from_numpy(values))


def _pieces(attention: attentions.AttentionModule, state: dict[str, torch.Tensor]) -> Pieces:
    buffers, pieces = {}, {}
    for name, spec in _with_biases(attention.tensors, state).items():
        buffers[name] = state[name].detach().double().cpu().numpy().copy()
        pieces_here = to_pieces(spec, buffers[name], attention.stage)
        assert all(np.shares_memory(piece, buffers[name]) for piece in pieces_here.values())  # what is written arrives
        pieces |= pieces_here
    return Pieces(pieces["q"], pieces["v"], pieces["o"], pieces.get("q_bias"), pieces.get("v_bias"), buffers)


def _with_biases(tensors: dict[str, TensorSpec], state: dict[str, torch.Tensor]) -> dict[str, TensorSpec]:
    """The matrices of an attention, and the biases of those that make queries or values, as specs of one axis."""
    specs = dict(tensors)
    for name, spec in tensors.items():
        bias = f"{name.rpartition('.')[0]}.bias"
        if {"q", "v"} & set(spec.role) and bias in state:
            at = outer_axis(spec)
            specs[bias] = replace(spec, name=bias, shape=(spec.shape[at],), axes=(spec.axes[at],))
    return specs
