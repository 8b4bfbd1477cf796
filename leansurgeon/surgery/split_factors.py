"""Measurements on sample inputs for `split_heads.activation_aware`: moments of queries and keys, errors, the refit of
W_o. Imports torch. Letters: B batch, T tokens, W width, H heads, D head_dim, M children of a head, R head_dim of a
child.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from leansurgeon.surgery.canonical import Attention
from leansurgeon.surgery.ridge import NormalEquations

# Queries of a sequence in the key moments: at least QUERIES, of long ones every SHARE-th. A few of many sequences tell
# more than many of a few (MiniLM-L6, 12 to 24 heads: guard error 0.153 with 8 of each, 0.163 with 64 of a quarter).
QUERIES, SHARE = 8, 16
MEMORY = 2**24  # numbers in the largest temporary array
ENOUGH = 32_768  # enough tokens for moments of head_dim x head_dim
PLAIN = 1e-3  # share of the plain key covariance in the weighted one, so that every direction has some weight


@dataclass(frozen=True)
class Torch:
    """A runnable attention in torch: `softmax(scale * q k^T) v` and the output projection."""

    q: Tensor  # (H, W, D)
    k: Tensor
    v: Tensor
    o: Tensor  # (H, D, W)
    q_bias: Tensor  # (H, 1, D)
    k_bias: Tensor
    v_bias: Tensor
    o_bias: Tensor  # (W,)
    scale: float
    causal: bool

    @classmethod
    def of(cls, a: Attention, scale: float, causal: bool) -> Torch:
        """Convert an attention whose queries share no keys; `scale` is that of its scores."""
        heads = {x: tensor(getattr(a, x)).mT.contiguous() for x in "qkv"}
        zeros = np.zeros((a.heads, a.head_dim))
        for x in "qkv":
            bias = getattr(a, f"{x}_bias")
            heads[f"{x}_bias"] = tensor(zeros if bias is None else bias)[:, None]
        o_bias = tensor(np.zeros(a.width) if a.o_bias is None else a.o_bias)
        return cls(**heads, o=tensor(a.o).permute(1, 2, 0), o_bias=o_bias, scale=scale, causal=causal)

    def project(self, x_BTW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values `(B, H, T, D)`."""

        def heads(weight_HWD: Tensor, bias_H1D: Tensor) -> Tensor:
            """Return the projections of x by all heads, (B, H, T, D)."""
            # One product for all heads: many narrow ones are several times slower.
            together = x_BTW.float() @ weight_HWD.transpose(0, 1).flatten(1)
            return together.unflatten(-1, weight_HWD.shape[::2]).transpose(1, 2) + bias_H1D

        return heads(self.q, self.q_bias), heads(self.k, self.k_bias), heads(self.v, self.v_bias)

    def weights(self, q: Tensor, k: Tensor, mask_BT: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Return the attention matrices `(B, H, T, T)`; `chosen` are the positions of q if it does not hold all."""
        scores = (self.scale * (q @ k.mT)).masked_fill(~mask_BT[:, None, None], -1e30)
        if self.causal:
            at = torch.arange(q.shape[-2]) if chosen is None else chosen
            ahead = torch.arange(k.shape[-2]) > at[:, None]
            scores = scores.masked_fill(ahead, -2e30)  # below masked keys, for rows that see no real key
        return scores.softmax(-1)

    def context(self, x_BTW: Tensor, mask_BT: Tensor) -> Tensor:
        """Return the input of the output projection, `(B, T, H * D)`, heads outermost."""
        q, k, v = self.project(x_BTW)
        return (self.weights(q, k, mask_BT) @ v).transpose(1, 2).flatten(2)

    def output(self, x_BTW: Tensor, mask_BT: Tensor) -> Tensor:
        """Return what the attention adds to the residual stream, `(B, T, W)`."""
        return self.context(x_BTW, mask_BT) @ self.o.flatten(0, 1) + self.o_bias


def tensor(x: np.ndarray) -> Tensor:
    """Return the array as a float32 tensor."""
    return torch.from_numpy(np.ascontiguousarray(x, np.float32))


def parts(inputs: Sequence[Tensor], masks: Sequence[Tensor], heads: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pieces of the batches whose attention matrices hold `MEMORY` numbers, each with its mask."""
    for x, mask in zip(inputs, masks, strict=True):
        rows = max(1, MEMORY // (heads * x.shape[1] ** 2))
        yield from zip(x.split(rows), mask.split(rows), strict=True)


def some(inputs: Sequence[Tensor], masks: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return evenly spaced batches (they may be sorted by length) that hold about `ENOUGH` tokens."""
    count = sum(x.shape[0] * x.shape[1] for x in inputs)
    keep = max(1, min(len(inputs), round(len(inputs) * ENOUGH / max(count, 1))))
    chosen = [i * len(inputs) // keep for i in range(keep)]
    return [inputs[i] for i in chosen], [masks[i] for i in chosen]


def moment(x_BHTD: Tensor, weight_BT: Tensor) -> Tensor:
    """Return `sum of weight * x x^T` over batch and tokens, `(H, D, D)`."""
    rows = x_BHTD.transpose(0, 1).flatten(1, 2)
    return ((rows * weight_BT.flatten()[:, None]).mT @ rows).double()


@torch.no_grad()
def score_moments(
    parent: Torch, inputs: Sequence[Tensor], masks: Sequence[Tensor], children: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the moments of queries `(H, 1, D, D)`, and of keys weighted by their effect on each child's output `(H, M,
    D, D)`, float64.

    The key moment is `sum_i U_i^T U_i`, `U_i = sum_j a_ij W (v_j - o_i) k_j^T`, over the real queries i (some of every
    sequence, drawn at random), where W is a root of the child's output projection.
    """
    heads, d = parent.q.shape[0], parent.q.shape[2]
    columns = np.array_split(np.arange(d), children)
    # R of the QR decomposition of each child's W_o, with far fewer rows: |R x| = |W_o x| on its values.
    factors = [torch.linalg.qr(parent.o[:, own].mT)[1] for own in columns]
    c_query = torch.zeros(heads, d, d, dtype=torch.double)
    plain = torch.zeros_like(c_query)
    c_key = torch.zeros(heads, children, d, d, dtype=torch.double)
    generator = torch.Generator().manual_seed(0)
    for x, mask in parts(*some(inputs, masks), heads):
        q, k, v = parent.project(x)
        weight = mask.float()
        mean = (k * weight[:, None, :, None]).sum(2, keepdim=True) / weight.sum(1).clamp_min(1)[:, None, None, None]
        c_query += moment(q, weight)
        plain += moment(k - mean, weight)
        count = max(QUERIES, x.shape[1] // SHARE)
        chosen = torch.randperm(x.shape[1], generator=generator)[:count].sort().values
        a = parent.weights(q[:, :, chosen], k, mask, chosen)
        a = a * weight[:, None, chosen, None]
        for c, (own, factor) in enumerate(zip(columns, factors, strict=True)):
            c_key[:, c] += output_gram(a, k - mean, v[..., own] @ factor.mT)
    c_key = c_key / trace(c_key) + PLAIN * (plain / trace(plain))[:, None]
    return c_query[:, None].numpy(), c_key.numpy()


def trace(c: Tensor) -> Tensor:
    """Return the trace of each matrix (..., 1, 1), clamped above zero for division."""
    return c.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(1e-300)[..., None, None]


def output_gram(a: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return `sum_i U_i^T U_i`, `U_i = sum_j a_ij (v_j - o_i) k_j^T`, `(H, D, D)`; zero rows of a do not count.

    a `(B, H, Q, T)`, k `(B, H, T, D)`, v `(B, H, T, R)`.
    """
    total = torch.zeros(k.shape[1], k.shape[3], k.shape[3], dtype=torch.double)
    rows = max(1, MEMORY // (k.shape[1] * max(a.shape[2], k.shape[2]) * k.shape[3] * v.shape[3]))
    for a1, k1, v1 in zip(a.split(rows), k.split(rows), v.split(rows), strict=True):
        pairs = (v1[..., :, None] * k1[..., None, :]).flatten(3)  # (B, H, T, R*D)
        u = (a1 @ pairs).unflatten(3, (v.shape[3], k.shape[3])) - (a1 @ v1)[..., None] * (a1 @ k1)[..., None, :]
        rows_u = u.transpose(0, 1).flatten(1, 3)
        total += (rows_u.mT @ rows_u).double()
    return total


@torch.no_grad()
def error(
    attention: Torch,
    inputs: Sequence[Tensor],
    target: Callable[[int], Tensor],
    masks: Sequence[Tensor],
    chosen: Sequence[int],
) -> float:
    """Return the relative error |output - target| / |target| over the real tokens of the chosen batches; `target`
    returns that of a batch.
    """
    wrong, all_of_it = 0.0, 0.0
    for b in chosen:
        goal = target(b)[masks[b]]
        wrong += float((attention.output(inputs[b], masks[b])[masks[b]] - goal).double().square().sum())
        all_of_it += float(goal.double().square().sum())
    return (wrong / max(all_of_it, 1e-300)) ** 0.5


def real_tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return which positions hold tokens, (B, T) bool; all of them without a mask."""
    return torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask.bool()


@torch.no_grad()
def refit_output(
    attention: Attention,
    runner: Torch,
    inputs: Sequence[Tensor],
    target: Callable[[int], Tensor],
    masks: Sequence[Tensor],
    chosen: Sequence[int],
    ridge: float,
) -> Attention:
    """Refit W_o (and its bias, if there is one) to lower the squared error on the chosen batches.

    Ridge regression on the residual, so the penalty pulls towards the present W_o; `ridge` is relative to the mean
    square of a coordinate of the context. Products of a batch are in float32, their sums and the solution in float64.
    """
    (inner, width), constant = runner.o.flatten(0, 1).shape, attention.o_bias is not None
    sums = NormalEquations(inner, width, constant=constant, exact=False, chunk=sys.maxsize)
    for b in chosen:
        context = runner.context(inputs[b], masks[b])[masks[b]]
        sums.add(context, target(b)[masks[b]] - (context @ runner.o.flatten(0, 1) + runner.o_bias))
    change = torch.linalg.solve(sums.system(ridge), sums.cross)
    o = change[:inner].mT.reshape(attention.o.shape).numpy().astype(np.float32)
    bias = attention.o_bias + change[inner].numpy().astype(np.float32) if constant else None
    return replace(attention, o=attention.o + o, o_bias=bias)
