"""Compute what a shape costs before and after surgery: parameters, operations, predicted training memory, and the
savings of each change. Nothing is written; torch is imported only if memory is requested.

Savings are attributed in a fixed order: first precision and attention (which need no surgery), then depth, heads and
the MLP, as in `planning.models_along`. Another order would divide the same sum differently.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from leansurgeon.architectures.base import Architecture, Config
from leansurgeon.checkpoints.recorded.part import plain
from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import UnsupportedModel
from leansurgeon.measure.costs import flops as operations
from leansurgeon.measure.costs.gpus import Gpu
from leansurgeon.measure.costs.memory import Prediction, Rehearsal, Setting
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.shape import ParameterCount, Shape
from leansurgeon.surgery.drop_layers import without_data
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.next_steps import UnfitFormats, cannot_hold, indivisible
from leansurgeon.surgery.planning import list_savings, models_along, reshape_source
from leansurgeon.surgery.requested_shape import RequestedShape

START = ("fp32", "eager")  # precision and attention that savings are counted from
STEPS = ("precision and attention", "depth", "heads", "mlp")


@dataclass(frozen=True)
class Cost:
    """Costs of one shape. `flops` (closed form; None if there is none) and `flops_counted` (by torch) are for a forward
    pass of one sample; `largest_batch` is the largest number of samples that fits the GPU.
    """

    shape: Shape
    parameters: ParameterCount
    flops: operations.Flops | None
    flops_counted: int | None = None
    memory: Prediction | None = None
    fits: bool | None = None
    largest_batch: int | None = None

    @property
    def operations(self) -> int | None:
        """FLOPs of a forward pass: by formula, else counted; None if neither is known."""
        return self.flops.total if self.flops else self.flops_counted

    def as_dict(self) -> JsonObject:
        """Return the costs of one model for JSON: FLOPs of a forward pass, memory in bytes."""
        return plain(vars(self))


@dataclass(frozen=True)
class Costs:
    """Costs before and after; `saved` by step in parameters, operations and bytes (negative if a step adds)."""

    source: str
    architecture: str
    why: str
    before: Cost
    after: Cost
    saved: dict[str, dict[str, int] | None]
    start: int | None  # bytes of the source in fp32 with eager attention
    gpu: Gpu | None
    refused: UnfitFormats | None = None  # formats that cannot hold the shape

    def as_dict(self) -> JsonObject:
        """Return the costs before and after for JSON."""
        return {
            "source": self.source,
            "architecture": self.architecture,
            "why": self.why,
            "before": self.before.as_dict(),
            "after": self.after.as_dict(),
            "saved_by": self.saved,
            "memory_in_fp32_with_eager_attention": self.start,
            "gpu": self.gpu and {"name": self.gpu.name, "memory": self.gpu.memory, "source": self.gpu.source},
            "indivisible": plain(list(map(vars, indivisible(self.after.shape)))),
            "cannot_hold": self.refused and plain(vars(self.refused)),
        }


def costs(
    source: Source,
    wanted: RequestedShape,
    setting: Setting | None = None,
    gpu: Gpu | None = None,
    *,
    cross_check: bool = False,
) -> Costs:
    """Compute the costs of the source and of the requested shape, with memory if a `setting` is given. torch counts
    operations for families without a closed form, and for all with `cross_check`.

    Raises `UsageError` for an impossible shape or setting, `UnsupportedModel` if memory cannot be predicted.
    """
    result, target = reshape_source(source, wanted)
    source, along = result.source, models_along(result)
    shapes, counts = [model.shape for model in along], [model.parameters for model in along]
    configs = [model.config() for model in along]
    tokens = setting.tokens if setting else None
    closed = [
        operations.closed_form(model.specs, model.shape, config, model.architecture, tokens)
        for model, config in zip(along, configs, strict=True)
    ]
    saved: dict[str, dict[str, int] | None] = {
        "parameters": list_savings(counts),
        "flops": None if None in closed else list_savings(closed),
        "memory": None,
    }
    ends = {0: (source.config, source.architecture), 3: (configs[3], target.architecture)}
    priced = {i: Cost(shapes[i], counts[i], closed[i]) for i in ends}
    start = None
    if setting is not None:
        chain = [ends[0], *((c, target.architecture) for c in configs[1:])]
        start, totals, priced = memory(chain, shapes, setting, gpu, priced)
        sums = [start, *totals]
        saved["memory"] = {step: a - b for step, a, b in zip(STEPS, sums, sums[1:], strict=False)}
    if cross_check or None in closed:
        for i, (config, architecture) in ends.items():
            with suppress(UnsupportedModel):  # no sample can be made up
                priced[i] = replace(priced[i], flops_counted=operations.count_flops(config, architecture, tokens))
    choice = without_data(source.shape, target.shape, Method(), source.architecture.period, source)
    refused = cannot_hold(source.architecture, target.architecture, target.shape, source.config, choice.kept)
    return Costs(source.name, target.architecture.name, target.why, priced[0], priced[3], saved, start, gpu, refused)


def memory(
    chain: list[tuple[Config, Architecture]],
    shapes: list[Shape],
    setting: Setting,
    gpu: Gpu | None,
    priced: dict[int, Cost],
) -> tuple[int, list[int], dict[int, Cost]]:
    """Predict memory. Return the bytes of the source in fp32 with eager attention, the bytes of every shape along the
    way, and the costs with memory filled in. A shape equal to the one before it is not predicted again.
    """
    kind = gpu.blas if gpu else "hopper"
    plain = replace(setting, precision=START[0], attention=START[1])
    totals = []
    rehearsal = peak = None
    for i, (config, architecture) in enumerate(chain):
        if i == 0 or shapes[i] != shapes[i - 1]:
            rehearsal = Rehearsal(config, architecture, setting)
            peak = rehearsal.peak(gpu=kind)
        totals.append(peak.total)
        if i in priced:
            fitting = {}
            if gpu:
                same = i and shapes[i] == shapes[0]
                most = priced[0].largest_batch if same else rehearsal.largest_batch(gpu.memory, gpu=kind)
                fitting = {"fits": peak.total <= gpu.memory, "largest_batch": most}
            priced = priced | {i: replace(priced[i], memory=peak, **fitting)}
    same = (setting.precision, setting.attention) == START
    start = totals[0] if same else Rehearsal(*chain[0], plain).peak(gpu=kind).total
    return start, totals, priced
