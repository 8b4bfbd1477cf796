"""Singular values of attention blocks, and statistics of them: condition number, ranks, and the numerical limits.

Letters: B batch, N tokens, M inner width (heads * head_dim), R = min(N, M).
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from leansurgeon.errors import Diverged
from leansurgeon.measure.kappa.figures import Conditioning

# Ratio of eigenvalues: above it (kappa < 5e5) the fp64 Gram matrix is accurate to 1e-5, and storing the block in fp32
# costs 1e-4; below it the SVD takes over.
SAFE_RATIO = 4e-12
CHUNK = 2**24  # elements processed together; a GPU holds them in fp64 (128 MiB), the host one sample at a time


def spectrum(block: Tensor) -> Tensor:
    """Return the singular values of every sample's block (B, N, M), in fp64 and descending: (B, min(N, M)).

    The Gram matrix of the smaller side is 2 to 7 times faster than an SVD; where it is not accurate (kappa over 5e5, or
    an eigenvalue that rounding made negative) that sample alone goes through `svdvals`. Raises `Diverged` if a real
    token is not finite.

    >>> spectrum(torch.diag(torch.tensor([4.0, 2.0, 1.0]))[None])
    tensor([[4., 2., 1.]], dtype=torch.float64)
    """
    block = block.detach()
    raw_BR, _ = _eigenvalues(_gram(block, None), block, None, centred=False)
    return _values(block, raw_BR, raw_BR[:, 0], None, False, block.shape[2])


def conditioning(
    block: Tensor, mask: Tensor | None = None, *, most: int | None = None, centred: bool = True
) -> list[Conditioning]:
    """Return statistics of every sample of a block (B, N, M); samples without a real token are left out.

    Stable rank is ||A||_F^2 / sigma_1^2, effective rank exp of the entropy of sigma / sum(sigma) (Roy and Vetterli
    2007), aspect M / N. Values below the noise of storing the block in its dtype do not count in the rank
    (`noise_floor`). `most` is the largest possible rank of the block if that is below min(N, M); `centred` False skips
    the second spectrum and leaves its figures NaN.
    """
    block, (b, n, m) = block.detach(), block.shape
    mask = None if mask is None else mask.to(block.device).bool()
    step = max(1, CHUNK // max(1, n * m))
    most, eps, statistics = min(m, most or m), torch.finfo(block.dtype).eps, []
    for start in range(0, b, step):
        part = block[start : start + step]
        real = None if mask is None else mask[start : start + step]
        raw_BR, left_BR = _eigenvalues(_gram(part, real), part, real, centred=centred)
        sigma_BR = _values(part, raw_BR, raw_BR[:, 0], real, False, most).cpu().numpy()  # faster on small arrays
        middle_BR = None
        if left_BR is not None:  # rounding errors scale with the whole block
            middle_BR = _values(part, left_BR, raw_BR.sum(1), real, True, most).cpu().numpy()
        for i, tokens in enumerate([n] * len(part) if real is None else real.sum(1).tolist()):
            if not tokens:
                continue
            sigma = sigma_BR[i]
            floor = noise_floor(sigma, tokens, m, eps)
            k = min(tokens, most)
            kappa, bound, rank = kappa_above(sigma, k, floor)
            # Subtracting the mean costs one dimension of the token side. The noise is that of the block as stored.
            middle = (math.nan, math.nan, 0)
            if middle_BR is not None:
                middle = kappa_above(middle_BR[i], min(tokens - 1, most), floor)
            total = sigma.sum()
            share = sigma[sigma > 0] / total
            statistics.append(
                Conditioning(
                    kappa=kappa,
                    bound=bound,
                    rank=rank,
                    k=k,
                    centred=middle[0],
                    centred_bound=middle[1],
                    stable_rank=float((sigma**2).sum() / sigma[0] ** 2) if total > 0 else 0.0,
                    effective_rank=float(np.exp(-(share * np.log(share)).sum())) if total > 0 else 0.0,
                    aspect=m / tokens,
                    tokens=tokens,
                )
            )
    return statistics


def noise_floor(sigma: Tensor | ndarray, tokens: int, inner: int, eps: float) -> float:
    """Return the smallest singular value that can be told from noise, for a (tokens, inner) block stored with machine
    epsilon `eps`.

    Rounding acts like an i.i.d. matrix with standard deviation eps / sqrt(12) * rms(A), whose largest singular value is
    that times sqrt(tokens) + sqrt(inner); the fp64 spectrum itself adds sigma_1 * max(tokens, inner) * 2.2e-16.
    """
    rms = math.sqrt(float((sigma**2).sum())) / math.sqrt(tokens * inner)
    storage = eps / math.sqrt(12) * rms * (math.sqrt(tokens) + math.sqrt(inner))
    return max(storage, float(sigma[0]) * max(tokens, inner) * torch.finfo(torch.float64).eps)


def kappa_above(sigma: Tensor | ndarray, k: int, floor: float) -> tuple[float, float, int]:
    """Return (kappa or infinity, lower bound, numerical rank) of a descending spectrum whose k-th value should be the
    smallest; values not above `floor` cannot be told from zero.
    """
    if k < 1:
        return math.nan, math.nan, 0
    rank = int((sigma[:k] > floor).sum())
    if rank == k:
        exact = float(sigma[0] / sigma[k - 1])
        return exact, exact, rank
    return math.inf, float(sigma[0]) / floor if floor > 0 else 1.0, rank


# -- the Gram matrix ------------------------------------------------------------------------------


def _real(block: Tensor, mask: Tensor | None) -> Tensor:
    """Set tokens that are not real to zero in blocks (..., N, M)."""
    return block if mask is None else block.masked_fill(~mask[..., None], 0.0)


def _gram(block: Tensor, mask: Tensor | None) -> Tensor:
    """Return the Gram matrix of the smaller side in fp64: (B, R, R)."""
    b, n, m = block.shape
    wide = n <= m
    if block.device.type == "cpu":
        # numpy notices that both factors are one matrix and has BLAS compute half of the symmetric product; torch
        # computes all of it. One thread: several wait for each other on a busy machine, and eigenvalues take longer.
        # One sample at a time, in a reused buffer, which is faster than allocating.
        gram, one = np.empty((b, min(n, m), min(n, m))), torch.empty(n, m, dtype=torch.float64)
        with _blas().limit(limits=1):
            for i in range(b):
                a = one.copy_(block[i] if mask is None else _real(block[i], mask[i])).numpy()
                np.matmul(*((a, a.T) if wide else (a.T, a)), out=gram[i])
        gram = torch.from_numpy(gram)
    else:
        a_BNM = _real(block, mask).to(torch.float64)
        gram = a_BNM @ a_BNM.mT if wide else a_BNM.mT @ a_BNM
    if not torch.isfinite(gram.diagonal(dim1=-2, dim2=-1)).all():  # sums of squares of whole rows (or columns)
        raise Diverged("The input of an output projection holds NaN or infinity, so it has no condition number.")
    return gram


@cache
def _blas() -> Any:
    """Return a controller for the BLAS threads of numpy and scipy, which torch does not control."""
    import scipy.linalg  # noqa: F401  # loads its own BLAS, so that it can be found
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")


def _eigenvalues(gram: Tensor, block: Tensor, mask: Tensor | None, *, centred: bool) -> tuple[Tensor, Tensor | None]:
    """Return the eigenvalues (B, R), descending, of the Gram matrix of the block and on request of that without its
    mean token.

    With P = I - ww' (w the normalized indicator of the real tokens), the centered Gram matrix is PGP of tokens (N <= M)
    and G - cuu' of columns, where sqrt(c) u = A'w. Either follows from G tridiagonalized in a basis that begins with w
    or u: without its first row and column, or with c subtracted from its corner. So both spectra share the most
    expensive step.
    """
    direction_BR, size_B = None, None
    if centred:
        real_BN = gram.new_ones(block.shape[:2]) if mask is None else mask.to(gram)
        direction_BR = real_BN / real_BN.sum(1, keepdim=True).clamp(min=1).sqrt()
        if block.shape[1] > block.shape[2]:
            scale_B1 = direction_BR.amax(1, keepdim=True)
            direction_BR = scale_B1 * _real(block, mask).sum(1, dtype=torch.float64)
            size_B = direction_BR.square().sum(1)
            direction_BR = direction_BR / size_B.sqrt().clamp(min=torch.finfo(torch.float64).tiny)[:, None]
    return (_by_lapack if gram.device.type == "cpu" else _by_torch)(gram, direction_BR, size_B)


def _by_torch(gram: Tensor, direction_BR: Tensor | None, size_B: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Compute both spectra one after the other, batched, on a GPU. `size_B` is c; None for a Gram matrix of tokens."""
    left_BR = None
    if direction_BR is not None:
        outer = direction_BR[:, :, None] @ direction_BR[:, None]
        if size_B is None:
            both = gram @ outer
            less = gram - both - both.mT + outer @ both
        else:
            less = gram - size_B[:, None, None] * outer
        left_BR = torch.linalg.eigvalsh(less).flip(-1)
    return torch.linalg.eigvalsh(gram).flip(-1), left_BR


def _by_lapack(gram: Tensor, direction_BR: Tensor | None, size_B: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Compute the same on the host, together. A reflection moves the direction to the first place, where LAPACK's
    reduction of the lower triangle keeps it.
    """
    from scipy.linalg import blas, lapack

    room = int(lapack.dsytrd_lwork(gram.shape[1], lower=1)[0])

    def descending(diagonal: ndarray, beside: ndarray) -> ndarray:
        return lapack.dsterf(diagonal, beside)[0][::-1] if len(diagonal) > 1 else diagonal.copy()

    raw, left = [], []
    with _blas().limit(limits=1):
        for i, symmetric in enumerate(gram.numpy()):
            lower = symmetric.T  # as Fortran stores it
            if direction_BR is not None:
                v = direction_BR[i].numpy().copy()
                v[0] += 1.0 if v[0] >= 0 else -1.0
                twice = 2 / (v @ v)
                p = twice * (symmetric @ v)
                lower = blas.dsyr2(-1.0, v, p - twice / 2 * (v @ p) * v, a=lower, lower=1)
            _, diagonal, beside, _, _ = lapack.dsytrd(lower, lower=1, lwork=room)
            raw.append(descending(diagonal, beside))
            if direction_BR is not None and size_B is None:
                left.append(np.append(descending(diagonal[1:], beside[1:]), 0.0))
            elif direction_BR is not None:
                diagonal[0] -= float(size_B[i])
                left.append(descending(diagonal, beside))
    return torch.from_numpy(np.stack(raw)), torch.from_numpy(np.stack(left)) if left else None


def _values(
    block: Tensor, eigenvalues_BR: Tensor, size_B: Tensor, mask: Tensor | None, centred: bool, most: int
) -> Tensor:
    """Return singular values (B, R) of the block or of the centered one from the eigenvalues of its Gram matrix;
    `size_B` scales the rounding errors. Values beyond the `most`-th are 0.
    """
    b, n, _ = block.shape
    counts_B = torch.full((b,), n, device=block.device) if mask is None else mask.sum(1)
    k_B = (counts_B - int(centred)).clamp(min=0, max=most)
    last = eigenvalues_BR.gather(1, (k_B - 1).clamp(min=0)[:, None])[:, 0]
    sigma_BR = eigenvalues_BR.clamp(min=0).sqrt()
    for i in (last <= SAFE_RATIO * size_B).nonzero()[:, 0].tolist():
        rows = (block[i] if mask is None else block[i, mask[i]]).to(torch.float64)
        rows = rows - rows.mean(0) if centred and len(rows) else rows
        exact = torch.linalg.svdvals(rows)[: int(k_B[i])]
        sigma_BR[i, : len(exact)] = exact
    beyond = torch.arange(sigma_BR.shape[1], device=sigma_BR.device) >= k_B[:, None]
    return sigma_BR.masked_fill(beyond, 0.0)
