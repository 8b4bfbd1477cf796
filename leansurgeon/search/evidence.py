"""Measure kappa and influence of every layer of the source in one pass over sample data. Imports torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import torch

from leansurgeon.architectures.towers import of_section
from leansurgeon.checkpoints import digests
from leansurgeon.checkpoints.blockwise.skeleton import Skeleton
from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.publish.durable import scratch
from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import LeanSurgeonError
from leansurgeon.measure.data.batches import thin
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.measure.kappa import blocks as kappa
from leansurgeon.progress import Say, silent
from leansurgeon.shape import groups_of
from leansurgeon.surgery import choose_layers
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.shrink import DecidedCut, carry_out

SAMPLES = 64  # for kappa, as in a recipe
VERSION = 2  # of the choice of samples; a new number invalidates the folders of older searches


@dataclass(frozen=True)
class Evidence:
    """Values by layer of the source. `tokens` is the mean number of real tokens per sample. `influence` is 1 -
    cos(input, output) (ShortGPT); None if nothing was learned or the model cannot be run block by block; `says` then
    explains it.
    """

    tokens: float
    kappa: list[float | None]
    influence: list[float] | None
    says: str


def gather(source: Source, data: Calibration, seed: int = 0, say: Say = silent) -> Evidence:
    """Return the evidence on the guard samples of `data`. For a preset, kappa is that of a model freshly initialized
    with `seed`.
    """
    say(f"Measuring kappa and influence of every layer of {source.name} on {data.says} ...")
    kappa, tokens = kappas(source, data, seed)
    if not source.learned:
        return Evidence(tokens, kappa, None, f"No influence of layers: nothing of {source.name} is learned yet.")
    try:
        return Evidence(tokens, kappa, influences(source, data), "")
    except LeanSurgeonError as error:
        return Evidence(tokens, kappa, None, f"No influence of layers: {error.message}")


def identity(source: Source) -> str:
    """Return a digest of the source's config and weight files."""
    weights = [digests.sha256(path) for path in (source.files or ())]
    return hashlib.sha256((json.dumps(source.config, sort_keys=True) + " ".join(weights)).encode()).hexdigest()


def kappas(source: Source, data: Calibration, seed: int) -> tuple[list[float | None], float]:
    """Return the median kappa of every layer (a lower bound for rank-deficient blocks), and the tokens per sample."""
    with scratch() as place:
        folder = source.folder
        if source.weights is None:
            folder = place / "model"
            carry_out(DecidedCut(plan(source, RequestedShape(), seed)), folder, check=False)
        loaded = load(folder, tower=of_section(source.architecture.section)).alone()
        guard = thin(data.guard, SAMPLES)  # sentences are sorted by length
        figures = kappa.measure_blocks(loaded, guard, data.mask, SAMPLES)
    per_layer = [at["median"] if at["median"] is not None else at["median_lower_bound"] for at in figures["layers"]]
    return merge_by_layer(per_layer, source.shape.depth), figures["tokens"] / figures["samples"]


def merge_by_layer(values: list[float | None], depth: int) -> list[float | None]:
    """Return one value per layer: the largest, if a layer has several attentions."""
    each = max(1, len(values) // depth)
    parts = [values[i : i + each] for i in range(0, len(values), each)]
    return [max((v for v in part if v is not None), default=None) for part in parts]


@torch.no_grad()
def influences(source: Source, data: Calibration) -> list[float]:
    """Return the influence of every layer, with one block of the source in memory."""
    teacher = Skeleton(source.used_config, source.architecture)
    teacher.fill_outer(source.weights.float32)

    def fill(layer: int) -> None:
        names = (spec.name for spec in source.specs if spec.layer == layer)
        teacher.fill(layer, {name: source.weights.float32(name) for name in names})

    masks, answers = ([of(batch) for batch in data.guard] for of in (data.mask, data.answer_mask))
    shape = source.shape
    return choose_layers.measure_layers(teacher, fill, data.guard, masks, groups_of(shape, shape), answers).influence
