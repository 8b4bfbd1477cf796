"""Everything that `leansurgeon kappa` measures on a checkpoint, in one JSON document. Imports torch."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from leansurgeon.checkpoints.model import Loaded, load
from leansurgeon.checkpoints.source import Source
from leansurgeon.hooks import Hooks
from leansurgeon.measure.data.batches import inner, pick, rows_of, thin
from leansurgeon.measure.data.calibration import Batch, Calibration
from leansurgeon.measure.heads import sites
from leansurgeon.measure.kappa import jacobian
from leansurgeon.measure.kappa.blocks import Mask, TokenMask, measure_blocks
from leansurgeon.measure.kappa.weights import find_attentions, weights
from leansurgeon.progress import Say, phase, silent
from leansurgeon.reading.jsonfile import JsonObject

SAMPLES, PROBES = 256, 16


def study(
    opened: Source, sample: Calibration, *, samples: int = SAMPLES, probes: int = PROBES, say: Say = silent
) -> JsonObject:
    """Load the model and measure it on held-out samples. Returns the content of `kappa.json`: its figures, with the
    data and options behind them. Raises what `measure_invariants` raises.
    """
    loaded = load(opened.folder, tower=opened.tower).alone()
    loaded.model.to("cuda" if torch.cuda.is_available() else "cpu").requires_grad_(False)
    kinds = [site.kind for site in sites.sites(loaded)]
    batches = thin(sample.heldout, samples)
    size = sum(map(rows_of, batches))
    passes = len(batches) + (min(jacobian.SAMPLES, size) * (probes + 1) if probes else 0)

    def mask(batch: Batch) -> Mask:
        real, written = sample.mask(batch), sample.answer_mask(batch)
        return [real if kind == "encoder" else written for kind in kinds] if "decoder_input_ids" in batch else real

    say(f"Measuring on held-out samples of {sample.says.rpartition(': ')[0]} ...")
    with phase("forward passes", passes, "passes/s") as advance, Hooks() as hooks:
        hooks.after(loaded.model, lambda *_: advance())
        figures = measure_invariants(loaded, batches, mask, size, probes=probes)
    for layer, kind in zip(figures["layers"], kinds, strict=True):
        layer["kind"] = kind
    return {
        "schema_version": 1,
        "kind": "kappa",
        "name": opened.name,
        "family": opened.architecture.name,
        "shape": opened.shape.as_dict(),
        "data": {"name": sample.name, "says": sample.says, "sha256": sample.digest},
        "options": {"samples": samples, "probes": probes},
        **figures,
    }


def measure_invariants(
    loaded: Loaded,
    batches: Iterable[Batch],
    token_mask: TokenMask,
    samples: int,
    *,
    probes: int,
) -> JsonObject:
    """Return the figures of `measure_blocks`, with `weights` (see `weights.weights`) and `jacobian` (see
    `jacobian.jacobian`) for every layer. The Jacobian uses a few samples from the middle, since sentences may be sorted
    by length; `probes` 0 skips it.
    """
    batches = list(batches)
    figures = measure_blocks(loaded, batches, token_mask, samples)
    parts = find_attentions(loaded)
    slopes = [None for _ in parts]
    if probes:
        probed = pick(batches, inner(samples, jacobian.SAMPLES))
        slopes = jacobian.jacobian(loaded, parts, probed, token_mask, probes=probes)
    for layer, matrices, slope in zip(figures["layers"], weights(loaded, parts), slopes, strict=True):
        layer["weights"], layer["jacobian"] = matrices, slope
    return figures
