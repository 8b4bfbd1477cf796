"""Drop layers: choose which to keep without data (evenly over the depth, or as the user says), and check a choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from leansurgeon.architectures.limits import move_taps
from leansurgeon.checkpoints.reshaped import within_block
from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import UsageError, plural
from leansurgeon.shape import SPACINGS, Shape, evenly_per_stage, groups_of
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.requested_shape import RequestedShape, per_stage

SPACED = {
    "even": "evenly, both ends among them",
    "first-of-each": "first of each group",
    "last-of-each": "last of each group",
}


OF_EVERY_KIND = ", one of every kind"
Kind: TypeAlias = tuple[int, Hashable]  # of a layer: its stage, and what distinguishes it from others there


@dataclass(frozen=True)
class LayerChoice:
    """The layers that are kept (numbered through all stages), the criterion, and its numbers."""

    kept: tuple[int, ...]
    criterion: str
    evidence: dict[str, Any] = field(default_factory=dict)


def without_data(
    before: Shape, after: Shape, method: Method, period: int = 1, source: Source | None = None
) -> LayerChoice:
    """Return the layers to keep when no data is used. Unless the user named them, layers of `source` are moved so that
    every kind is present, if they can move: libraries need that, and it takes precedence over formats that expect a
    pattern.
    """
    named = method.kept
    if named is not None:
        check_kept(named, before, after, period)
        return LayerChoice(named, "as listed")
    spacing = method.layers if method.layers in SPACINGS else "even"
    kept = evenly_per_stage(before, after, period, spacing)
    whole = with_every_kind(kinds_of(source), kept) if source else kept
    if whole == kept or explain_misplaced(source, whole):
        return LayerChoice(kept, SPACED[spacing])
    return LayerChoice(whole, SPACED[spacing] + OF_EVERY_KIND)


def kinds_of(source: Source) -> list[Kind]:
    """Return the kind of each layer within its stage: the names and switches that the config lists for it, and its
    tensors where those differ. Empty if layers go in groups, each of which holds every kind.
    """
    arch, shape = source.architecture, source.shape
    if arch.period > 1:
        return []
    lists = [values for values in arch.lists(dict(source.config)).values() if isinstance(values, list | tuple)]
    switches = [values for values in lists if all(isinstance(v, str) or v in (0, 1) for v in values)]
    kinds = []
    for stage, span in enumerate(shape.spans):
        told = [values for values in switches if len(values) in (shape.depth, len(span))]
        for place, layer in enumerate(span):
            said = tuple(values[layer if len(values) == shape.depth else place] for values in told)
            held = (within_block(spec, arch) for spec in source.specs if arch.uneven and spec.layer == layer)
            kinds.append((stage, (said, frozenset(held))))
    return kinds


def with_every_kind(kinds: Sequence[Kind], kept: Sequence[int]) -> tuple[int, ...]:
    """Return the same number of layers with one of every kind: a missing kind replaces the nearest layer of a kind that
    has others. The ends of a stage are replaced last, since no other layer does what they do. Returns the set unchanged
    if it is too small for that.

    >>> with_every_kind([(0, kind) for kind in "aaabaaab"], (0, 4, 5))
    (0, 3, 5)
    """
    whole = sorted(kept)
    for missing in dict.fromkeys(kinds):
        held = Counter(kinds[layer] for layer in whole)
        if held[missing]:
            continue
        here = [layer for layer in whole if kinds[layer][0] == missing[0]]
        swaps = [
            (2 * (old == here[0]) + (old == here[-1]), abs(new - old), new, old)
            for old in here
            for new, kind in enumerate(kinds)
            if kind == missing and held[kinds[old]] > 1
        ]
        if not swaps:
            return tuple(kept)
        *_, new, old = min(swaps)
        whole = sorted({*whole, new} - {old})
    return tuple(whole)


def check_kept(kept: Sequence[int], before: Shape, after: Shape, period: int) -> None:
    """Raise `UsageError` if a set of layers does not match the planned shape, or splits a group of layers."""
    for number, groups in enumerate(groups_of(before, after, period), 1):
        here = [layer for layer in kept if layer in groups.stage]
        where = f"of stage {number} " if len(before.stages) > 1 else ""
        if len(here) != groups.keep or list(kept) != sorted(set(kept)):
            raise UsageError(f"The layers {list(kept)} keep {len(here)} {where}and the plan needs {groups.keep}.")
        if not groups.holds(here):
            raise UsageError(f"Layers alternate in this model: keep whole groups of {period}.")


def explain_misplaced(source: Source, kept: Sequence[int]) -> str | None:
    """Return in one sentence what a kept layer would lose at its new place; None if each still works there."""
    arch, config = source.architecture, source.config
    if reason := explain_tied_start(source, kept):
        return reason
    try:  # parts of the model that read from given layers: too few may be left
        move_taps(arch.taps, (dict(arch.flat(dict(config))), dict(config)), list(kept), source.shape.stages[0].depth)
    except UsageError as error:
        return error.message
    if arch.uneven:  # a result then has exactly the tensors of the layers that it keeps
        return None
    # The new first layer of each stage loses a tensor if the library's first layer has none (ModernBERT's has no norm
    # before its attention).
    for span in source.shape.spans:
        first = next((i for i in kept if i in span), span.start)
        places = {within_block(s, arch) for s in source.specs if s.layer == span.start}
        inside = ((s.name, within_block(s, arch)) for s in source.specs if s.layer == first)
        if lost := next((name for name, within in inside if within not in places), None):
            return (
                f"Layer {first} would become the first of its stage, and there {arch.name} has no place for '{lost}'."
            )
    return None


def explain_tied_start(source: Source, kept: Sequence[int]) -> str | None:
    """Check layers that must stay: in some models other parts address the first layers by number, in others the library
    turns the last layer into another kind than the config says (Gemma 4).
    """
    arch = source.architecture
    for span, most in zip(source.shape.spans, arch.stay_last, strict=False):
        if gone := [layer for layer in span[len(span) - most :] if layer not in kept]:
            return f"Layer {gone[0]} has to stay: {arch.name} computes something else where another layer is the last."
    for span, least in zip(source.shape.spans, arch.stay, strict=False):
        if gone := [layer for layer in span[:least] if layer not in kept]:
            return (
                f"Layer {gone[0]} has to stay: the first {plural(least, 'layer')} of this {arch.name} cannot move, "
                "because other parts of the model address them by number."
            )
    return None


def refuse_misplaced(source: Source, init: str, kept: Sequence[int]) -> None:
    """Raise `UsageError` if a kept layer cannot work at its new place; suggests layers that can stay."""
    if init == "fresh" or not (why := explain_misplaced(source, kept)):
        return
    chosen = []  # as many layers of each stage, with its fixed first and last ones among them
    for number, span in enumerate(source.shape.spans):
        here = [i for i in kept if i in span]
        arch = source.architecture
        least = span[: max(1, arch.stay[number] if arch.stay else 0)]
        last = span[len(span) - (arch.stay_last[number] if arch.stay_last else 0) :]
        room = len(here) - len(last)
        chosen += [*least, *here[len(least) : room], *last] if room >= len(least) else here
    named = "" if explain_misplaced(source, chosen) else f" For example: --keep {','.join(map(str, chosen))}."
    raise UsageError(why, f"--keep names the layers that stay.{named}")


def with_kept(shape: Shape, wanted: RequestedShape, method: Method) -> RequestedShape:
    """Translate `--keep` to layers per stage. Raises `UsageError` if it contradicts `--layers` or the model."""
    named = method.kept
    if named is None:
        return wanted
    if named[-1] >= shape.depth:
        raise UsageError(f"--keep {method.keep}: the model has the layers 0 to {shape.depth - 1}.")
    counts = [sum(i in span for i in named) for span in shape.spans]
    if 0 in counts:
        raise UsageError(f"--keep {method.keep} leaves no layer of stage {counts.index(0) + 1}.")
    if wanted.layers is not None and per_stage(wanted.layers, [s.depth for s in shape.stages], "--layers") != counts:
        raise UsageError(f"--keep {method.keep} keeps {', '.join(map(str, counts))} layers, not {wanted.layers}.")
    return replace(wanted, layers=",".join(map(str, counts)))
