"""Kappa with what a change of basis cannot move beside it: `measure.kappa` (which has A W_o already), the products of
weights, and the Jacobian of every block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from leansurgeon.measure import attentions, kappa
from leansurgeon.measure.jacobian import PROBES, SAMPLES, jacobian
from leansurgeon.measure.weights import weights


def measure(
    loaded: Any,
    batches: Iterable[dict[str, Tensor]],
    token_mask: Callable[[dict[str, Tensor]], kappa.Mask],
    samples: int,
    *,
    probes: int = PROBES,
    half: torch.dtype | None = None,
) -> dict:
    """What `kappa.measure` gives, and for every layer `weights` (see `weights.weights`) and `jacobian` (see
    `jacobian.jacobian`, on the first few samples). `probes` 0 leaves the Jacobian out.
    """
    first: list[dict[str, Tensor]] = []

    def noted() -> Iterable[dict[str, Tensor]]:
        for batch in batches:
            if sum(kappa.batch_size(b) for b in first) < SAMPLES:
                first.append(batch)
            yield batch

    found = kappa.measure(loaded, noted(), token_mask, samples, half=half)
    parts = attentions.of(loaded)
    slopes: list[dict | None] = [None for _ in parts]
    if probes:
        slopes = jacobian(loaded, parts, first, token_mask, samples=min(SAMPLES, samples), probes=probes)
    for layer, matrices, slope in zip(found["layers"], weights(loaded, parts), slopes, strict=True):
        layer["weights"], layer["jacobian"] = matrices, slope
    return found
