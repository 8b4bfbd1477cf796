"""Split heads into more heads: exact if head_dim stays, near if the number of parameters must not grow.

A head computes `softmax(s * q k^T) v`, and the output projection sums over heads. The children of a head together
compute the same if each has its scores, and their values and output columns partition the parent's. Equal scores for
every input need a score form `q^T k` of rank at most the children's head_dim. So

* `exact` keeps head_dim (or lets it grow) and copies q and k;
* `weights_only` and `activation_aware` divide head_dim among the children (the `split` policy: every tensor keeps its
  shape) and give each child the best score form of the smaller rank, each by its own criterion.

Shape letters: B batch, T tokens, W width, H heads, D head_dim, M children of a head, R head_dim of a child.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from leansurgeon.checkpoints.recorded.decided import Split
from leansurgeon.shape import Stage
from leansurgeon.surgery.canonical import Attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

Array = np.ndarray
FLOOR = 1e-8  # smallest eigenvalue of a moment relative to its largest; lower ones are raised to it
FIFTH = 5  # every fifth batch guards


# -- exact ----------------------------------------------------------------------------------------


def exact(attention: Attention, after: Stage, gain: float) -> Attention:
    """Return the same function with `after.heads` heads of at least the old size: every child has a copy of its
    parent's q and k, and a disjoint slice of its output columns; new entries are zero. `gain` is the old score scale
    over the new one.
    """
    children, d = after.heads // attention.heads, attention.head_dim
    root = float(np.sqrt(gain))

    def copies(x: Array | None, factor: float = 1.0) -> Array | None:
        """Repeat every head once per child, times a factor, padded to the new head_dim."""
        return None if x is None else pad((x * factor).repeat(children, 0), 1, after.head_dim).astype(np.float32)

    o = np.zeros((attention.width, attention.heads, children, after.head_dim), np.float32)
    for child, columns in enumerate(shares(d, children)):
        o[:, :, child, columns] = attention.o[..., columns]
    return replace(
        attention,
        q=copies(attention.q, root),
        k=copies(attention.k, root),
        v=copies(attention.v),
        o=o.reshape(attention.width, after.heads, -1),
        q_bias=copies(attention.q_bias, root),
        k_bias=copies(attention.k_bias, root),
        v_bias=copies(attention.v_bias),
    )


def shares(total: int, parts: int) -> list[Array]:
    """Split `total` indices into `parts` runs of nearly equal length."""
    return np.array_split(np.arange(total), parts)


def pad(x: Array, axis: int, size: int) -> Array:
    """Append zeros along one axis up to `size`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return np.pad(x, widths)


# -- score forms of smaller rank: which `q^T k` a child computes -----------------------------------


def decompose(c_query: Array, c_key: Array) -> tuple[Array, ...]:
    """Return U, S, V^T of the product of the moments' symmetric square roots, and the inverses of both (..., D, D)."""
    roots, inverses = [], []
    for c in (c_query, c_key):
        values, vectors = np.linalg.eigh(np.asarray(c, np.float64))
        values = np.maximum(values, np.maximum(values[..., -1:] * FLOOR, 1e-300))
        root, turned = np.sqrt(values)[..., None, :], np.swapaxes(vectors, -1, -2)
        roots.append(vectors * root @ turned)
        inverses.append(vectors / root @ turned)
    return *np.linalg.svd(roots[0] @ roots[1]), *inverses


# -- at equal parameters ----------------------------------------------------------------------------


def assemble(attention: Attention, after: Stage, left: Array, right: Array) -> Attention:
    """Return children with the score forms `q' = left q`, `k' = right k` (H, M, R, D) in the basis of their parents.

    Each has its slice of the parent's values and output columns.

    The key bias adds the same to all scores of a query, which the softmax ignores: it becomes zero.
    """
    m, r, d = left.shape[1], after.head_dim, attention.head_dim

    def apply_form(form: Array, x: Array) -> Array:  # (H, M, R, D) on (H, D, ...) -> (H*M, R, ...)
        return (
            np.einsum("hmrd,hd...->hmr...", form, x.astype(np.float64)).reshape(-1, r, *x.shape[2:]).astype(np.float32)
        )

    def divide_rows(x: Array) -> Array:  # (H, D, ...) -> (H*M, R, ...)
        parts = [pad(x[:, columns], 1, r).astype(np.float32) for columns in shares(d, m)]
        return np.stack(parts, axis=1).reshape(-1, r, *x.shape[2:])

    return replace(
        attention,
        q=apply_form(left, attention.q),
        k=apply_form(right, attention.k),
        v=divide_rows(attention.v),
        o=np.moveaxis(divide_rows(np.moveaxis(attention.o, 0, -1)), -1, 0),
        q_bias=None if attention.q_bias is None else apply_form(left, attention.q_bias),
        k_bias=None if attention.k_bias is None else np.zeros((after.heads, r), np.float32),
        v_bias=None if attention.v_bias is None else divide_rows(attention.v_bias),
    )


def weights_only(attention: Attention, after: Stage, gain: float) -> Attention:
    """Split heads to a smaller rank without data, assuming white inputs. `gain` is as in `exact`.

    Half of a child's rank holds the largest parts of the score form, the same in every child; the other half holds
    every n-th of the next ones, scaled by n, so that the n children hold them all on average. On MiniLM-L6, 12 to 24
    heads (one run, 100 sentences), embeddings keep a cosine of 0.909 with it; with the largest parts only 0.877, with a
    config edit 0.883, with `activation_aware` on random token ids 0.976.
    """
    q, k = attention.q.astype(np.float64), attention.k.astype(np.float64)
    middle = np.zeros(q.shape[:2]) if attention.q_bias is None else attention.q_bias.astype(np.float64)
    c_query = q @ np.swapaxes(q, -1, -2) + middle[..., :, None] * middle[..., None, :]
    u, s, vt, q_inverse, k_inverse = decompose(c_query, k @ np.swapaxes(k, -1, -2))
    children, rank = after.heads // attention.heads, after.head_dim
    shared = min(rank // 2, s.shape[-1])
    left, right = [], []
    for child in range(children):
        own = np.arange(shared + child, s.shape[-1], children)[: rank - shared]
        chosen = np.concatenate([np.arange(shared), own])
        strength = np.concatenate([np.ones(shared), np.full(len(own), float(children))])
        share = np.sqrt(gain * strength * s[:, chosen])[..., None]
        left.append(pad(share * np.swapaxes(u[..., chosen], -1, -2) @ q_inverse, -2, rank))
        right.append(pad(share * vt[:, chosen] @ k_inverse, -2, rank))
    return assemble(attention, after, np.stack(left, axis=1), np.stack(right, axis=1))


def activation_aware(
    attention: Attention,
    inputs_BTW: Sequence[Tensor],
    masks: Sequence[Tensor | None],
    after: Stage,
    *,
    causal: bool,
    targets_BTW: Sequence[Tensor] | None,
    score_scale: float,
    gain: float,
    ridge: float | None,
) -> tuple[Attention, Split]:
    """Split heads to a smaller rank with the least change of the attention's output on sample inputs.

    Returns the attention, the kept share of the weighted score form, and the relative output error on the guard.

    Each child gets the score form of rank head_dim that minimizes, to first order, the error of *its own part of the
    output*. If scores of query i err by e_ij, the child's output errs by `sum_j a_ij (v_j - o_i) e_ij` with attention a
    and output o, so a score counts by the attention that it gets and by how much its value differs from the mean. With
    `U_i = sum_j a_ij W_o (v_j - o_i) k_j^T` the squared error is `sum_i |U_i (form error)^T q_i|^2`; its best separable
    weight is the moment of the queries (biases included) times `sum_i U_i^T U_i`: the sum of squares of `Cq^1/2 (form
    error) Ck^1/2` is minimized. Then W_o is refitted by ridge regression to `targets_BTW`.

    inputs_BTW: inputs of the attention, `(B, T, width)` per batch (of the cut network).
    masks: `(B, T)`, true where a token is real, or None. causal: whether tokens see only those before them.
    targets_BTW: target outputs of the attention; None: the parent's outputs for the same inputs.
    score_scale: factor of q . k in the parent. gain: as in `exact`.
    ridge: of the refit, relative to the mean square of a head's output; None leaves W_o unchanged. Every fifth batch
    guards (of few batches, every fifth piece): the refit is kept only if it lowers the error there.
    """
    from leansurgeon.surgery import split_factors as factors

    each = -(-FIFTH // len(inputs_BTW))  # pieces per batch, split by samples
    real = [factors.real_tokens(x, m) for x, m in zip(inputs_BTW, masks, strict=True)]
    masks = [piece for mask in real for piece in mask.chunk(each)]
    targets_BTW = targets_BTW and [piece for y in targets_BTW for piece in y.chunk(each)]
    inputs_BTW = [piece for x in inputs_BTW for piece in x.chunk(each)]
    parent = factors.Torch.of(attention, score_scale, causal)
    every = range(len(inputs_BTW))  # every fifth guards, of fewer the last; a single one does both
    guard = [b for b in every if b % FIFTH == FIFTH - 1] or [every[-1]]
    fit = [b for b in every if b not in guard] or guard
    moments = factors.score_moments(parent, inputs_BTW, masks, after.heads // attention.heads)
    # Eckart-Young in the whitened basis. The factors share the singular values evenly, so that q and k stay of equal
    # size.
    u, s, vt, q_inverse, k_inverse = decompose(*moments)
    rank = after.head_dim
    share, energy = np.sqrt(gain * s[..., :rank, None]), np.square(s)
    left = share * np.swapaxes(u[..., :rank], -1, -2) @ q_inverse
    right = share * vt[..., :rank, :] @ k_inverse
    kept = energy[..., :rank].sum(-1) / np.maximum(energy.sum(-1), np.finfo(np.float64).tiny)

    def goal(b: int) -> Tensor:
        """Return the target of one batch, computed on demand since all at once might not fit in memory."""
        return parent.output(inputs_BTW[b], masks[b]) if targets_BTW is None else targets_BTW[b]

    def error(candidate: Attention) -> float:
        runner = factors.Torch.of(candidate, parent.scale / gain, causal)
        return round(factors.error(runner, inputs_BTW, goal, masks, guard), 6)

    split = assemble(attention, after, left, right)
    numbers = Split(round(float(kept.mean()), 6), error(split))
    if ridge is None:
        return split, numbers
    child = factors.Torch.of(split, parent.scale / gain, causal)
    refitted = factors.refit_output(split, child, inputs_BTW, goal, masks, fit, ridge)
    after_refit = error(refitted)
    better = after_refit < numbers.error_split
    return refitted if better else split, replace(numbers, error_refit=after_refit, refitted=better)
