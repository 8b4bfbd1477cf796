"""Kappa with what a change of basis cannot move beside it: `measure.kappa` (which has A W_o already), the products of
weights, and the Jacobian of every block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from leansurgeon.measure.data.batches import inner, rows_of, some_rows
from leansurgeon.measure.kappa import attentions
from leansurgeon.measure.kappa import blocks as kappa
from leansurgeon.measure.kappa.figures import JacobianKappa, ModelKappa
from leansurgeon.measure.kappa.jacobian import PROBES, SAMPLES, jacobian
from leansurgeon.measure.kappa.weights import weights


def measure_invariants(
    loaded: kappa.Measured,
    batches: Iterable[dict[str, Tensor]],
    token_mask: Callable[[dict[str, Tensor]], kappa.Mask],
    samples: int,
    *,
    probes: int = PROBES,
    half: torch.dtype | None = None,
) -> ModelKappa:
    """What `blocks.measure_blocks` gives, and for every layer `weights` (see `weights.weights`) and `jacobian` (see
    `jacobian.jacobian`, on a few samples, neither the first nor the last: sentences may stand by their length).
    `probes` 0 leaves the Jacobian out.
    """
    few = inner(samples, SAMPLES)
    probed: list[dict[str, Tensor]] = []
    seen = 0

    def noted() -> Iterable[dict[str, Tensor]]:
        nonlocal seen
        for batch in batches:
            size = rows_of(batch)
            here = few[(few >= seen) & (few < seen + size)] - seen
            seen += size
            if len(here):
                probed.append(some_rows(batch, here))
            yield batch

    figures = kappa.measure_blocks(loaded, noted(), token_mask, samples, half=half)
    parts = attentions.of(loaded)
    slopes: list[JacobianKappa | None] = [None for _ in parts]
    if probes:
        slopes = jacobian(loaded, parts, probed, token_mask, samples=SAMPLES, probes=probes)
    for layer, matrices, slope in zip(figures["layers"], weights(loaded, parts), slopes, strict=True):
        layer["weights"], layer["jacobian"] = matrices, slope
    return figures
