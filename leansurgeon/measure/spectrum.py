"""Singular values of attention blocks, and what they say: condition number, ranks, and where the numbers end.

Letters: B batch, N tokens, M inner width (heads * head_dim), R = min(N, M).
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from leansurgeon.errors import Diverged
from leansurgeon.measure.samples import Conditioning

# Of eigenvalues: above it (kappa < 1e6) the fp64 Gram is right to 1e-5, and storing the block in fp32 costs 3e-4; below
# it the SVD takes over.
SAFE_RATIO = 1e-12
CHUNK = 2**24  # elements of a block that are held in fp64 at once (128 MiB)


def spectrum(block: Tensor, mask: Tensor | None = None, *, centred: bool = False) -> Tensor:
    """Singular values of every sample's block, in fp64 and descending: (B, min(N, M)).

    `block` is (B, N, M) in any floating dtype, `mask` (B, N) with True at real tokens. Values beyond min(real tokens,
    M) are 0, so sigma_k stands at index min(real tokens, M) - 1 and a padded sample gives what its cropped matrix
    gives. `centred` subtracts the mean token first, which costs one dimension of the token side.

    The Gram matrix of the smaller side is 2 to 7 times faster than an SVD; where it is not exact (kappa over 1e6, or
    an eigenvalue that rounding made negative) that sample alone goes through `svdvals`. Raises `Diverged` when a real
    token is not finite.

    >>> spectrum(torch.diag(torch.tensor([4.0, 2.0, 1.0]))[None])
    tensor([[4., 2., 1.]], dtype=torch.float64)
    """
    a_BNM = _real(block, mask)
    gram = _gram(a_BNM)
    return _values(a_BNM, _centred(gram, a_BNM, mask) if centred else gram, gram, mask, centred, a_BNM.shape[2])


def conditioning(
    block: Tensor, mask: Tensor | None = None, *, most: int | None = None, centred: bool = True
) -> list[Conditioning]:
    """Statistics of every sample of a block (B, N, M); samples without a real token are left out.

    Stable rank is ||A||_F^2 / sigma_1^2, effective rank exp of the entropy of sigma / sum(sigma) (Roy and Vetterli
    2007), aspect M / N. Values under the noise that storing the block in its dtype makes are not counted in the rank
    (`noise_floor`). `most` is the largest rank that the block can have where that is below min(N, M); `centred` False
    spares the second spectrum and leaves its figures NaN.
    """
    b, n, m = block.shape
    step = max(1, CHUNK // max(1, n * m))
    found: list[Conditioning] = []
    for start in range(0, b, step):
        part = None if mask is None else mask[start : start + step].to(block.device).bool()
        found += _conditioning(block[start : start + step], part, min(m, most or m), centred)
    return found


def _conditioning(block: Tensor, mask: Tensor | None, most: int, centred: bool) -> list[Conditioning]:
    a_BNM = _real(block, mask)
    b, n, m = a_BNM.shape
    counts = [n] * b if mask is None else mask.sum(1).tolist()
    gram = _gram(a_BNM)
    sigma_BR = _values(a_BNM, gram, gram, mask, False, most).cpu()
    middle_BR = None
    if centred:
        middle_BR = _values(a_BNM, _centred(gram, a_BNM, mask), gram, mask, True, most).cpu()

    eps = torch.finfo(block.dtype).eps
    found = []
    for i, tokens in enumerate(counts):
        if not tokens:
            continue
        sigma = sigma_BR[i]
        floor = noise_floor(sigma, tokens, m, eps)
        k = min(tokens, most)
        kappa, bound, rank = kappa_above(sigma, k, floor)
        # Subtracting the mean costs one dimension of the token side. The noise is that of the block as stored.
        other = (
            (math.nan, math.nan, 0) if middle_BR is None else kappa_above(middle_BR[i], min(tokens - 1, most), floor)
        )
        total = sigma.sum()
        share = sigma[sigma > 0] / total
        found.append(
            Conditioning(
                kappa=kappa,
                bound=bound,
                rank=rank,
                k=k,
                centred=other[0],
                centred_bound=other[1],
                stable_rank=float((sigma**2).sum() / sigma[0] ** 2) if total > 0 else 0.0,
                effective_rank=float(torch.exp(-(share * share.log()).sum())) if total > 0 else 0.0,
                aspect=m / tokens,
                tokens=tokens,
            )
        )
    return found


def noise_floor(sigma: Tensor, tokens: int, inner: int, eps: float) -> float:
    """The singular value under which nothing can be told, for a (tokens, inner) block stored with machine epsilon
    `eps`.

    Rounding acts like an i.i.d. matrix with standard deviation eps / sqrt(12) * rms(A), whose largest singular value
    is that times sqrt(tokens) + sqrt(inner); the fp64 spectrum itself adds sigma_1 * max(tokens, inner) * 2.2e-16.
    """
    rms = float(sigma.square().sum().sqrt()) / math.sqrt(tokens * inner)
    storage = eps / math.sqrt(12) * rms * (math.sqrt(tokens) + math.sqrt(inner))
    return max(storage, float(sigma[0]) * max(tokens, inner) * torch.finfo(torch.float64).eps)


def kappa_above(sigma: Tensor, k: int, floor: float) -> tuple[float, float, int]:
    """(kappa or infinity, lower bound, numerical rank) of a descending spectrum whose k-th value should be the
    smallest; what is not above `floor` cannot be told from zero."""
    if k < 1:
        return math.nan, math.nan, 0
    rank = int((sigma[:k] > floor).sum())
    if rank == k:
        exact = float(sigma[0] / sigma[k - 1])
        return exact, exact, rank
    return math.inf, float(sigma[0]) / floor if floor > 0 else 1.0, rank


# -- the Gram matrix ------------------------------------------------------------------------------


def _real(block: Tensor, mask: Tensor | None) -> Tensor:
    """The block in fp64 with zeros at tokens that are not real."""
    block = block.detach()
    block = (block.cpu() if block.device.type == "mps" else block).to(torch.float64)  # Apple's GPUs have no fp64
    return block if mask is None else block.masked_fill(~mask.to(block.device).bool()[..., None], 0.0)


def _gram(a_BNM: Tensor) -> Tensor:
    """The Gram matrix of the smaller side: (B, R, R)."""
    wide = a_BNM.shape[1] <= a_BNM.shape[2]
    if a_BNM.device.type == "cpu":
        # numpy sees that both factors are one matrix and has BLAS compute half of the symmetric product; torch computes
        # all of it. One thread: several of them wait for each other on a busy machine, and eigenvalues take longer.
        a = a_BNM.contiguous().numpy()
        with _blas().limit(limits=1):
            gram = torch.from_numpy(a @ a.swapaxes(1, 2) if wide else a.swapaxes(1, 2) @ a)
    else:
        gram = a_BNM @ a_BNM.mT if wide else a_BNM.mT @ a_BNM
    if not torch.isfinite(gram.diagonal(dim1=-2, dim2=-1)).all():  # sums of squares of whole rows (or columns)
        raise Diverged("The input of an output projection holds NaN or infinity, so it has no condition number.")
    return gram


@cache
def _blas() -> Any:
    """numpy's BLAS, whose threads are not torch's to count."""
    from threadpoolctl import ThreadpoolController  # comes with scikit-learn

    return ThreadpoolController().select(user_api="blas")


def _centred(gram: Tensor, a_BNM: Tensor, mask: Tensor | None) -> Tensor:
    """The Gram matrix of the block without its mean token, from that of the block: no second product of its size."""
    b, n, m = a_BNM.shape
    real_BN = a_BNM.new_ones(b, n) if mask is None else mask.to(a_BNM)
    count_B11 = real_BN.sum(1).clamp(min=1)[:, None, None]
    if n > m:
        mean_B1M = a_BNM.sum(1, keepdim=True) / count_B11
        return gram - count_B11 * (mean_B1M.mT @ mean_B1M)
    ones_BN1 = real_BN[..., None]
    with_mean_BN1 = gram @ ones_BN1 / count_B11  # every token times the mean token
    both = with_mean_BN1 @ ones_BN1.mT
    return gram - both - both.mT + (ones_BN1.mT @ with_mean_BN1 / count_B11) * (ones_BN1 @ ones_BN1.mT)


def _values(a_BNM: Tensor, gram: Tensor, whole: Tensor, mask: Tensor | None, centred: bool, most: int) -> Tensor:
    """Singular values (B, R) from `gram`, which is that of the block or of the centred one; `whole` is that of the
    block, whose size says how large rounding errors are. Values beyond the `most`-th are 0.
    """
    b, n, _ = a_BNM.shape
    counts_B = torch.full((b,), n, device=gram.device) if mask is None else mask.to(gram.device).bool().sum(1)
    k_B = (counts_B - int(centred)).clamp(min=0, max=most)
    eigenvalues = torch.linalg.eigvalsh(gram).flip(-1)
    last = eigenvalues.gather(1, (k_B - 1).clamp(min=0)[:, None])[:, 0]
    sigma_BR = eigenvalues.clamp(min=0).sqrt()
    size_B = whole.diagonal(dim1=-2, dim2=-1).sum(1) if centred else eigenvalues[:, 0]
    for i in (last <= SAFE_RATIO * size_B).nonzero()[:, 0].tolist():
        rows = a_BNM[i] if mask is None else a_BNM[i, mask[i].to(a_BNM.device).bool()]
        rows = rows - rows.mean(0) if centred and len(rows) else rows
        exact = torch.linalg.svdvals(rows)[: int(k_B[i])]
        sigma_BR[i, : len(exact)] = exact
    beyond = torch.arange(sigma_BR.shape[1], device=sigma_BR.device) >= k_B[:, None]
    return sigma_BR.masked_fill(beyond, 0.0)
