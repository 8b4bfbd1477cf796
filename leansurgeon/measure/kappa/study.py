"""Everything that `leansurgeon kappa` measures of a checkpoint, in one document that JSON can hold. Imports torch."""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import Tensor

from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.source import Source
from leansurgeon.measure.data.batches import rows_of, thin
from leansurgeon.measure.data.calibration import Batch, Calibration
from leansurgeon.measure.heads import sites
from leansurgeon.measure.kappa import invariant, jacobian
from leansurgeon.measure.kappa.blocks import Mask, headless
from leansurgeon.measure.kappa.figures import ModelKappa
from leansurgeon.progress import Say, phase, silent

SAMPLES, PROBES = 256, 16
HALVES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class KappaDocument(ModelKappa):
    """The figures of a model with what they were measured on; kept as `kappa.json`."""

    schema_version: int
    kind: str
    name: str
    family: str
    shape: dict[str, Any]
    data: DataNamed
    options: dict[str, Any]


class DataNamed(TypedDict):
    """The sample data: its name, what it says of itself, and its digest."""

    name: str
    says: str
    sha256: str


def study(
    opened: Source,
    sample: Calibration,
    *,
    samples: int = SAMPLES,
    probes: int = PROBES,
    precision: str = "fp32",
    say: Say = silent,
) -> KappaDocument:
    """Load the model and measure it on held-out samples. Raises what `invariant.measure_invariants` raises."""
    loaded = load(opened.folder, tower=opened.tower).alone()
    loaded.model.to("cuda" if torch.cuda.is_available() else "cpu").requires_grad_(False)
    kinds = [site.kind for site in sites.sites(loaded)]
    batches = thin(sample.heldout, samples)
    size = sum(map(rows_of, batches))
    passes = len(batches) + (min(jacobian.SAMPLES, size) * (probes + 1) if probes else 0)

    def mask(batch: Batch) -> Mask:
        real: Tensor | None = sample.mask(batch)
        if "decoder_input_ids" not in batch:
            return real
        written = batch["labels"] != -100  # behind an answer stand tokens that fill up
        return [real if kind == "encoder" else written for kind in kinds]

    say(f"Measuring on held-out samples of {sample.says.rpartition(': ')[0]} ...")
    with phase("forward passes", passes, "passes/s") as advance:
        watched = headless(loaded, advance)
        figures = invariant.measure_invariants(watched, batches, mask, size, probes=probes, half=HALVES[precision])
    for layer, kind in zip(figures["layers"], kinds, strict=True):
        layer["kind"] = kind
    return {
        "schema_version": 1,
        "kind": "kappa",
        "name": opened.name,
        "family": opened.architecture.name,
        "shape": opened.shape.as_dict(),
        "data": {"name": sample.name, "says": sample.says, "sha256": sample.digest},
        "options": {"samples": samples, "probes": probes, "precision": precision},
        **figures,
    }
