"""Drop layers: keep whole layers. Without data they are chosen evenly over the depth, or as the user says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import UsageError, plural
from leansurgeon.shape import SPACINGS, Shape, evenly_per_stage
from leansurgeon.surgery.plan.method import Method, kept_numbers
from leansurgeon.surgery.plan.operator import Operator
from leansurgeon.surgery.plan.wanted import Wanted, per_stage

SPACED = {
    "even": "evenly, both ends among them",
    "first-of-each": "first of each group",
    "last-of-each": "last of each group",
}


@dataclass(frozen=True)
class Choice:
    """The layers that are kept, counted through all stages, what chose them, and the numbers behind it."""

    kept: tuple[int, ...]
    criterion: str
    evidence: dict[str, Any] = field(default_factory=dict)


def starts(shape: Shape) -> list[int]:
    """The number of the first layer of every stage."""
    return [sum(stage.depth for stage in shape.stages[:i]) for i in range(len(shape.stages))]


def without_data(before: Shape, after: Shape, method: Method, period: int = 1) -> Choice:
    """The layers that stay where no data is asked."""
    named = kept_numbers(method.keep)
    if named is not None:
        groups = [
            {start + j for j in range(first, min(first + period, stage.depth))}
            for stage, start in zip(before.stages, starts(before), strict=True)
            for first in range(0, stage.depth, period)
        ]
        if any(group & set(named) and not group <= set(named) for group in groups):
            raise UsageError(f"Layers alternate in this model: keep whole groups of {period}.")
        return Choice(named, "as listed")
    spacing = method.layers if method.layers in SPACINGS else "even"
    return Choice(evenly_per_stage(before, after, period, spacing), SPACED[spacing])


def misplaced(source: Source, kept: Sequence[int]) -> tuple[int, str] | None:
    """The first kept layer that would lose a tensor where it becomes the first of its stage, whose first layer has none
    (ModernBERT's has no norm before its attention), and that tensor's name in the source. None where every layer brings
    tensors of its own kind.
    """
    start = 0
    if source.architecture.uneven:  # a result has the tensors of the very layers that it keeps
        return None
    for number, stage in enumerate(source.shape.stages):
        first = next((i for i in kept if start <= i < start + stage.depth), start)
        template = source.architecture.blocks(number).layer
        held = {
            layer: {spec.name.replace(template.format(i=layer - start), "", 1): spec.name for spec in specs}
            for layer in {start, first}
            for specs in [[s for s in source.specs if s.layer == layer]]
        }
        if lost := next((held[first][key] for key in held[first] if key not in held[start]), None):
            return first, lost
        start += stage.depth
    return None


def refuse_misplaced(source: Source, init: str, kept: Sequence[int]) -> None:
    """Raises `UsageError` where a kept layer cannot do at its new place what it did."""
    if init != "fresh" and (found := misplaced(source, kept)):
        layer, name = found
        raise UsageError(
            f"Layer {layer} would become the first of its stage, and there {source.architecture.name} has no "
            f"place for '{name}'.",
            "Keep the first layer; --keep names the layers that stay.",
        )


def with_kept(shape: Shape, wanted: Wanted, method: Method) -> Wanted:
    """`--keep` as a number of layers per stage. Raises `UsageError` where it contradicts `--layers` or the model."""
    named = kept_numbers(method.keep)
    if named is None:
        return wanted
    if named[-1] >= shape.depth:
        raise UsageError(f"--keep {method.keep}: the model has the layers 0 to {shape.depth - 1}.")
    counts, start = [], 0
    for stage in shape.stages:
        counts.append(sum(start <= i < start + stage.depth for i in named))
        start += stage.depth
    if 0 in counts:
        raise UsageError(f"--keep {method.keep} leaves no layer of stage {counts.index(0) + 1}.")
    if wanted.layers is not None and per_stage(wanted.layers, [s.depth for s in shape.stages], "--layers") != counts:
        raise UsageError(f"--keep {method.keep} keeps {', '.join(map(str, counts))} layers, not {wanted.layers}.")
    return replace(wanted, layers=",".join(map(str, counts)))


def operator(depth: int, kept: tuple[int, ...], choice: Choice) -> Operator:
    """The step that drops the layers not kept, or fuses each with the one before."""
    dropped = [i for i in range(depth) if i not in kept]
    if choice.criterion == "fuse":
        pairs = [[i - 1, i] for i in dropped]
        says = f"fuse {plural(len(pairs), 'pair')} of layers, each into one: {', '.join(f'{a}+{b}' for a, b in pairs)}"
        return Operator("fuse-layers", "near", says, {"pairs": pairs, "kept": list(kept), "evidence": choice.evidence})
    return Operator(
        "drop-layers",
        "near",
        f"keep {len(kept)} of {plural(depth, 'layer')}, {choice.criterion}: {', '.join(map(str, kept))}",
        {"kept": list(kept), "dropped": dropped, "criterion": choice.criterion, "evidence": choice.evidence},
    )
