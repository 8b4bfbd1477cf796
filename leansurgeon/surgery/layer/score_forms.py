"""Score forms of smaller rank: which `q^T k` a child of a head computes, and how near it comes to its parent's. numpy.

Shape letters: H heads, D head_dim, M children of a head, R head_dim of a child.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Array = np.ndarray
FLOOR = 1e-8  # smallest eigenvalue of a moment, relative to its largest, that counts as one


@dataclass(frozen=True)
class Forms:
    """Score forms of all children in the basis of their parents: `q' = left q`, `k' = right k`."""

    left: Array  # (H, M, R, D)
    right: Array  # (H, M, R, D)
    kept: float  # share of the weighted score form (squared) that the smaller rank keeps, mean over children


def low_rank(c_query: Array, c_key: Array, rank: int, gain: float) -> Forms:
    """The rank-`rank` forms nearest to `gain * q^T k` for query moments and key moments `(H, M, D, D)`.

    Minimises the sum of squares of `Cq^1/2 (I - left^T right) Ck^1/2`: Eckart-Young in the whitened basis. The
    factors share the singular values evenly, so that q and k stay of equal size.
    """
    q_root, q_inverse = roots(c_query)
    k_root, k_inverse = roots(c_key)
    u, s, vt = np.linalg.svd(q_root @ k_root)
    share = np.sqrt(gain * s[..., :rank, None])
    left = share * np.swapaxes(u[..., :rank], -1, -2) @ q_inverse
    right = share * vt[..., :rank, :] @ k_inverse
    energy = np.square(s)
    kept = energy[..., :rank].sum(-1) / np.maximum(energy.sum(-1), np.finfo(np.float64).tiny)
    if rank > left.shape[-2]:  # more room than the parent needs
        left, right = (grown64(x, rank) for x in (left, right))
    return Forms(left, right, float(kept.mean()))


def divided_form(c_query: Array, c_key: Array, children: int, rank: int, gain: float) -> Forms:
    """Half of the rank as in `low_rank`, half in turns: `(H, D, D)` moments to forms of every child."""
    q_root, q_inverse = roots(c_query)
    k_root, k_inverse = roots(c_key)
    u, s, vt = np.linalg.svd(q_root @ k_root)
    shared = min(rank // 2, s.shape[-1])
    left, right = [], []
    for child in range(children):
        own = np.arange(shared + child, s.shape[-1], children)[: rank - shared]
        chosen = np.concatenate([np.arange(shared), own])
        strength = np.concatenate([np.ones(shared), np.full(len(own), float(children))])
        share = np.sqrt(gain * strength * s[:, chosen])[..., None]
        left.append(grown64(share * np.swapaxes(u[..., chosen], -1, -2) @ q_inverse, rank))
        right.append(grown64(share * vt[:, chosen] @ k_inverse, rank))
    return Forms(np.stack(left, axis=1), np.stack(right, axis=1), 1.0)


def grown64(x: Array, rank: int) -> Array:
    """The second to last axis grown to `rank` with zeros, in float64."""
    return np.concatenate([x, np.zeros((*x.shape[:-2], rank - x.shape[-2], x.shape[-1]))], axis=-2)


def roots(c: Array) -> tuple[Array, Array]:
    """Symmetric square root of a moment `(..., D, D)` and its inverse, float64, with eigenvalues held above FLOOR."""
    values, vectors = np.linalg.eigh(np.asarray(c, np.float64))
    values = np.maximum(values, np.maximum(values[..., -1:] * FLOOR, 1e-300))
    root = np.sqrt(values)[..., None, :]
    turned = np.swapaxes(vectors, -1, -2)
    return vectors * root @ turned, vectors / root @ turned
