"""Drop layers: keep whole layers. Without data they are chosen evenly over the depth, or as the user says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from leansurgeon.architectures.limits import move_taps
from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import UsageError, plural
from leansurgeon.shape import SPACINGS, Shape, evenly_per_stage
from leansurgeon.surgery.plan.method import Method, kept_numbers
from leansurgeon.surgery.plan.operators.base import Operator
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


def misplaced(source: Source, kept: Sequence[int]) -> str | None:
    """What a kept layer would lose at its new place, in a sentence; None where each can do there what it did."""
    return tied_to_the_start(source, kept) or unheard(source, kept) or without_room(source, kept)


def tied_to_the_start(source: Source, kept: Sequence[int]) -> str | None:
    """Other parts of some models speak to the first layers by their numbers, which therefore all stay."""
    start, arch = 0, source.architecture
    for stage, least in zip(source.shape.stages, arch.stay, strict=False):
        gone = next((i for i in range(least) if start + i not in kept), None)
        if gone is not None:
            return (
                f"Layer {start + gone} has to stay: the first {plural(least, 'layer')} of this {arch.name} cannot "
                "move, since what enters there is told by their number."
            )
        start += stage.depth
    return None


def unheard(source: Source, kept: Sequence[int]) -> str | None:
    """Where other parts listen behind layers of which too few are left."""
    arch, config = source.architecture, source.config
    try:
        places = dict(arch.flat(dict(config))), dict(config)
        move_taps(arch.taps, places, list(kept), source.shape.stages[0].depth)
    except UsageError as error:
        return error.message
    return None


def without_room(source: Source, kept: Sequence[int]) -> str | None:
    """A layer that becomes the first of its stage loses a tensor where the first has none (ModernBERT's has no norm
    before its attention).
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
            return (
                f"Layer {first} would become the first of its stage, and there {source.architecture.name} has no place "
                f"for '{lost}'."
            )
        start += stage.depth
    return None


def refuse_misplaced(source: Source, init: str, kept: Sequence[int]) -> None:
    """Raises `UsageError` where a kept layer cannot do at its new place what it did, with layers that could stay."""
    if init != "fresh" and (why := misplaced(source, kept)):
        other = placed_well(source, kept)
        named = f" For example: --keep {','.join(map(str, other))}." if other else ""
        raise UsageError(why, f"--keep names the layers that stay.{named}")


def placed_well(source: Source, kept: Sequence[int]) -> list[int] | None:
    """As many layers of each stage, the first ones among them, the rest as they are; None where that is not enough."""
    chosen, start = [], 0
    for number, stage in enumerate(source.shape.stages):
        here = [i for i in kept if start <= i < start + stage.depth]
        least = range(start, start + max(1, source.architecture.stay[number] if source.architecture.stay else 0))
        rest = [i for i in here if i not in least]
        chosen += sorted([*least, *rest[len(rest) - (len(here) - len(least)) :]]) if len(here) >= len(least) else here
        start += stage.depth
    return None if misplaced(source, chosen) else chosen


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
