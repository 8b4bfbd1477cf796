"""Condition numbers of attention's weight matrices, and of the products that a change of basis cannot move.

W_q, W_k, W_v and W_o as they stand depend on the basis of every head: W_v -> R W_v with W_o -> W_o R^-1 is the same
model. Its values reach the output through W_o W_v alone, and queries meet keys in W_q^T W_k; the kappa of these
products, sigma_1 / sigma_d over the head_dim values that can differ from zero, belongs to the function. Where rotary
positions or norms stand between queries and keys, W_q^T W_k is not all that counts of them.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import torch

from leansurgeon.measure.kappa import attentions
from leansurgeon.measure.kappa.blocks import Measured
from leansurgeon.measure.kappa.figures import MatrixKappa, median_or_bound
from leansurgeon.measure.kappa.spectrum import kappa_above, noise_floor, spectrum

FP32 = torch.finfo(torch.float32).eps
Matrices: TypeAlias = dict[str, MatrixKappa]  # by the names of `weights`


def weights(loaded: Measured, modules: list[attentions.AttentionModule | None]) -> list[Matrices | None]:
    """For every attention: `q`, `k`, `v`, `o` (whole matrices) and, over heads, the median of `vo` and `qk` with the
    number of heads whose product lacks rank. None where the weights have no such form.

    A figure is `{"value": x, "lower_bound": null}`, or the other way round where the rank is not full.
    """
    pieces = (attentions.matrices(loaded, attention) if attention else None for attention in modules)
    return [None if matrices is None else of_matrices(matrices) for matrices in pieces]


def of_matrices(m: dict[str, np.ndarray]) -> Matrices:
    """The same from matrices as `attentions.matrices` gives them."""
    width, heads, _ = m["o"].shape
    each = heads // m["k"].shape[0]
    k, v = (np.repeat(m[name], each, axis=0) for name in ("k", "v"))
    out = m["o"].transpose(1, 0, 2)  # (heads, width, head_dim)
    flat = {name: m[name].reshape(-1, width) for name in ("q", "k", "v")} | {"o": m["o"].reshape(width, -1)}
    return {name: figure(*of_matrix(values)) for name, values in flat.items()} | {
        "vo": over_heads(out, v),
        "qk": over_heads(m["q"].transpose(0, 2, 1), k),
    }


def of_matrix(values: np.ndarray) -> tuple[float, float]:
    """(kappa or infinity, lower bound) of one matrix that is stored in fp32."""
    sigma = spectrum(torch.from_numpy(np.ascontiguousarray(values))[None])[0]
    return kappa_above(sigma, len(sigma), noise_floor(sigma, *values.shape, FP32))[:2]


def over_heads(left: np.ndarray, right: np.ndarray) -> MatrixKappa:
    """Median over heads of kappa(left @ right), (heads, n, d) and (heads, d, m), without making the products: the
    singular values are those of a d x d core between two QR factors.
    """
    d, n, m = right.shape[1], left.shape[1], right.shape[2]
    if d > min(n, m):  # the product is smaller than its factors
        core, most = torch.from_numpy(left @ right), min(n, m)
    else:
        factors = (torch.from_numpy(np.ascontiguousarray(x)) for x in (left, right.swapaxes(1, 2)))
        first, second = (torch.linalg.qr(x)[1] for x in factors)
        core, most = first @ second.mT, d
    pairs = [kappa_above(s, most, noise_floor(s, n, m, FP32))[:2] for s in torch.linalg.svdvals(core)]
    lost = sum(not math.isfinite(value) for value, _ in pairs)
    value, bound = median_or_bound(*zip(*pairs, strict=True))
    worst = None if lost else max(value for value, _ in pairs)
    return {"value": value, "lower_bound": bound, "worst": worst, "deficient": lost}


def figure(value: float, bound: float) -> MatrixKappa:
    """A matrix's kappa as JSON holds it: no infinity, its bound in its place."""
    return {"value": value, "lower_bound": None} if math.isfinite(value) else {"value": None, "lower_bound": bound}
