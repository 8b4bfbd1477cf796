"""Change of basis within a head: factors of the same product with other condition numbers. Uses numpy only.

A head's values reach the output only through W_o W_v, so W_v -> R W_v, W_o -> W_o R^-1 changes nothing for any
invertible R, except the kappa of the factors, and with it the effect of a gradient step. `balance` returns the best
conditioned factors: since kappa(W_o) kappa(W_v) >= kappa(W_o W_v), the larger of the two is at least sqrt(kappa(W_o
W_v)). With the SVD W_o W_v = U S V^T the factors U S^1/2 and S^1/2 V^T attain that bound, and no other pair has a
smaller sum of squared norms; of their rotations the one nearest to the old factors is taken.

Shape letters: D head_dim, N and M the sizes of the two outer sides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Array = np.ndarray
FULL_RANK = 1e-6  # smallest singular value of a factor relative to its largest, below which it is rank-deficient
WORTH = 0.99  # a basis must lower the larger kappa at least by this factor


@dataclass(frozen=True)
class Pair:
    """The factors of one product in fp64, and their condition numbers `(left, right)` before and after."""

    left: Array  # (N, D)
    right: Array  # (D, M)
    basis: Array | None  # R (D, D) of right -> R right; None if unchanged
    before: tuple[float, float]
    after: tuple[float, float]


def balance(left: Array, right: Array) -> Pair:
    """Return factors of the same product `left @ right` whose condition numbers are both sqrt(kappa(left @ right)).

    The SVD is that of a D x D core between two QR factors; the full product is never formed.
    """
    left, right = left.astype(np.float64), right.astype(np.float64)
    (q_left, r_left), (q_right, r_right) = np.linalg.qr(left), np.linalg.qr(right.T)
    spectra = [np.linalg.svd(r, compute_uv=False) for r in (r_left, r_right)]
    before = (kappa(spectra[0]), kappa(spectra[1]))
    same = Pair(left, right, None, before, before)
    d = left.shape[1]
    if any(len(s) < d or s[-1] <= FULL_RANK * s[0] for s in spectra):
        return same
    u, s, vt = np.linalg.svd(r_left @ r_right.T)
    root, reached = np.sqrt(s), float(np.sqrt(s[0] / s[-1]))
    if reached > WORTH * max(before):
        return same
    basis, new_left, new_right = (u / root).T @ r_left, q_left @ (u * root), (root[:, None] * vt) @ q_right.T
    # Any rotation of this basis is as good; the one nearest to the old basis changes the least (Procrustes).
    x, _, yt = np.linalg.svd(right @ new_right.T + left.T @ new_left)
    turn = x @ yt
    new_left = new_left @ turn.T
    new_left[~left.any(axis=1)] = 0  # zero rows stay exactly zero
    return Pair(new_left, turn @ new_right, turn @ basis, before, (reached, reached))


def kappa(singular: Array) -> float:
    """Return sigma_1 / sigma_last; infinite for a singular matrix."""
    return float(singular[0] / singular[-1]) if len(singular) and singular[-1] > 0 else float("inf")
