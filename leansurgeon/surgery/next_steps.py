"""Find what a result may not fit after surgery, before it is made: widths that a quantizer, several GPUs or a kernel
cannot divide, and file formats that cannot hold its heads. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leansurgeon.architectures.base import Architecture, Config
from leansurgeon.architectures.formats import KNOWN, OURS, PATTERNS, UNREAD
from leansurgeon.shape import Shape

GROUPS = (32, 64, 128, 256)  # input values of a matrix that share a scale (GPTQ, AWQ, GGUF, torchao)
GPUS = (2, 4, 8)  # of tensor parallelism, which splits heads and MLP over the GPUs
KERNELS = (8, 64)  # for matrix units: 8 to be used at all in 16 bits, 64 for whole tiles
HEAD_DIM_KERNELS = (8,)  # fused attention takes every multiple of 8


@dataclass(frozen=True)
class Indivisible:
    """One number of the shape (`size`), and the group sizes, numbers of GPUs and kernel widths that do not divide it
    evenly.
    """

    name: str
    size: int
    groups: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    kernels: tuple[int, ...] = ()


def indivisible(shape: Shape) -> tuple[Indivisible, ...]:
    """Return every number of the shape that something does not divide, each once, stage by stage."""
    numbers = []
    for stage in shape.stages:
        numbers += [  # groups run along a matrix's inputs: the width, the inner width (output projection) and the MLP
            Indivisible("width", stage.width, not_by(stage.width, GROUPS), (), not_by(stage.width, KERNELS)),
            Indivisible("inner width", stage.inner, not_by(stage.inner, GROUPS), (), not_by(stage.inner, KERNELS)),
            Indivisible("MLP", stage.mlp_dim, *(not_by(stage.mlp_dim, of) for of in (GROUPS, GPUS, KERNELS))),
            Indivisible("head_dim", stage.head_dim, kernels=not_by(stage.head_dim, HEAD_DIM_KERNELS)),
            Indivisible("heads", stage.heads, gpus=not_by(stage.heads, GPUS)),
        ]
        if stage.kv_heads != stage.heads:  # engines copy them as long as their number divides the number of GPUs
            apart = tuple(n for n in not_by(stage.kv_heads, GPUS) if n % stage.kv_heads)
            numbers.append(Indivisible("key/value heads", stage.kv_heads, gpus=apart))
    return tuple(dict.fromkeys(n for n in numbers if n.groups or n.gpus or n.kernels))


def not_by(size: int, of: Sequence[int]) -> tuple[int, ...]:
    """Return the members of `of` that do not divide `size`.

    >>> not_by(576, GROUPS)
    (128, 256)
    """
    return tuple(n for n in of if size % n)


@dataclass(frozen=True)
class UnfitFormats:
    """Formats that cannot hold a shape, why, and an option that they could hold."""

    formats: tuple[str, ...]
    why: str
    instead: str


@dataclass(frozen=True)
class LayerPattern:
    """A format whose program decides by position which layers are of another kind: every `period`-th is `called` so."""

    name: str
    called: str
    period: int

    def holds(self, layers: Sequence[int]) -> bool:
        """Return whether each of these source layers lands at a place of its kind."""
        return all(self.is_other(layer) == self.is_other(place) for place, layer in enumerate(layers))

    def is_other(self, place: int) -> bool:
        """Return whether a layer at this place is of the other kind."""
        return (place + 1) % self.period == 0

    def near(self, wanted: Sequence[float], depth: int) -> tuple[int, ...]:
        """Choose as many of `depth` layers as `wanted` holds, each close to the wanted one and of the kind of its new
        place.

        >>> LayerPattern("", "", 4).near([0, 2.75, 5.5, 8.25, 11], 12)
        (0, 2, 5, 7, 10)
        """
        count = len(wanted)

        def follows(layer: int, place: int) -> bool:
            """Return whether the layers behind this one suffice for the places behind this one."""
            for other in range(place + 1, count):
                layer = next((i for i in range(layer + 1, depth) if self.is_other(i) == self.is_other(other)), depth)
            return layer < depth

        kept = []
        for place, near in enumerate(wanted):
            behind = range(kept[-1] + 1 if kept else 0, depth)
            fitting = [i for i in behind if self.is_other(i) == self.is_other(place) and follows(i, place)]
            kept.append(min(fitting, key=lambda i: abs(i - near)))
        return tuple(kept)


def pattern_of(arch: Architecture, config: Config) -> LayerPattern | None:
    """Return the layer pattern that a format expects of a family; None without one, or if the source does not follow
    it.
    """
    for name, families in PATTERNS.items():
        if arch.name in families:
            key, value, called, period = families[arch.name]
            found = LayerPattern(name, called, period)
            kinds = arch.lists(config).get(key)
            if isinstance(kinds, list) and all((k == value) == found.is_other(i) for i, k in enumerate(kinds)):
                return found
    return None


def cannot_hold(
    before: Architecture, after: Architecture, shape: Shape, config: Config | None = None, layers: Sequence[int] = ()
) -> UnfitFormats | None:
    """Return the formats that know the family `before` but cannot hold `shape` in the family `after`, or the remaining
    source `layers` of a model with this `config` (then with nearly evenly spaced layers that the format would read
    correctly); None if there are none.
    """
    if config is not None and layers:
        pattern, depth, count = pattern_of(before, config), before.shape(config).depth, len(layers)
        if pattern and not pattern.holds(layers) and max(layers) < depth:
            there = ", ".join(str(i + 1) for i, layer in enumerate(layers) if pattern.is_other(layer)) or "none"
            nth = f"{pattern.period}{'nd' if pattern.period == 2 else 'th'}"
            why = f"every {nth} layer there is {pattern.called}, and here it would be {there}"
            evenly = pattern.near([place * (depth - 1) / max(1, count - 1) for place in range(count)], depth)
            return UnfitFormats((pattern.name,), why, f"--keep {','.join(map(str, evenly))}")
    stage = next((s for s in shape.stages if s.inner != s.width), None)
    if stage is None:
        return None
    family, decoupled = before.name.removeprefix(OURS), after.name.startswith(OURS)
    table = KNOWN if decoupled else UNREAD
    formats = tuple(name for name, families in table.items() if family in families)
    if not formats:
        return None
    why = (
        f"its inner width is {stage.inner:,} ({stage.heads} heads of {stage.head_dim}), and there a {family} must have "
        f"heads of width / heads ({stage.width:,} / {stage.heads})"
    )
    if decoupled and stage.width % stage.heads == 0:
        return UnfitFormats(formats, why, f"--head-dim split ({stage.heads} heads of {stage.width // stage.heads})")
    fitting = stage.width // stage.head_dim
    fits = stage.width % stage.head_dim == 0 and fitting % (1 if decoupled else stage.kv_heads) == 0
    return UnfitFormats(formats, why, f"--heads {fitting}" if fits else "the source's own number of heads")
