"""What a result meets after surgery, said before it: widths that a quantiser, several GPUs or a kernel cannot divide,
and file formats that cannot hold its heads. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from leansurgeon.architectures.base import Architecture, Config
from leansurgeon.architectures.formats import KNOWN, OURS, PATTERNS, UNREAD
from leansurgeon.shape import Shape, Stage

GROUPS = (32, 64, 128, 256)  # values that share a scale, along what a matrix takes in (GPTQ, AWQ, GGUF, torchao)
GPUS = (2, 4, 8)  # of tensor parallelism, which gives each its heads and its part of the MLP
KERNELS = (8, 64)  # what matrix units want: 8 to be used at all in 16 bits, 64 for whole tiles
HEAD_DIM_KERNELS = (8,)  # fused attention takes every head_dim that 8 divides


@dataclass(frozen=True)
class Indivisible:
    """One number of the shape (`size`), and which group sizes, numbers of GPUs and kernel widths do not divide it."""

    name: str
    size: int
    groups: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    kernels: tuple[int, ...] = ()


def indivisible(shape: Shape) -> tuple[Indivisible, ...]:
    """Every number of the shape that some next step cannot divide, each once, stage by stage."""
    numbers_of_all = (number for stage in shape.stages for number in numbers(stage))
    return tuple(dict.fromkeys(n for n in numbers_of_all if n.groups or n.gpus or n.kernels))


def numbers(stage: Stage) -> Iterator[Indivisible]:
    """The numbers of one stage with what does not divide them.

    Groups lie along what a matrix takes in: the width, the inner width (output projection) and the MLP. Key/value heads
    fewer than the GPUs are copied by engines where they divide them.
    """
    yield Indivisible("width", stage.width, not_by(stage.width, GROUPS), (), not_by(stage.width, KERNELS))
    yield Indivisible("inner width", stage.inner, not_by(stage.inner, GROUPS), (), not_by(stage.inner, KERNELS))
    yield Indivisible("MLP", stage.mlp_dim, *(not_by(stage.mlp_dim, of) for of in (GROUPS, GPUS, KERNELS)))
    yield Indivisible("head_dim", stage.head_dim, kernels=not_by(stage.head_dim, HEAD_DIM_KERNELS))
    yield Indivisible("heads", stage.heads, gpus=not_by(stage.heads, GPUS))
    if stage.kv_heads != stage.heads:
        apart = tuple(n for n in not_by(stage.kv_heads, GPUS) if n % stage.kv_heads)
        yield Indivisible("key/value heads", stage.kv_heads, gpus=apart)


def not_by(size: int, of: Sequence[int]) -> tuple[int, ...]:
    """Those of `of` that do not divide `size`.

    >>> not_by(576, GROUPS)
    (128, 256)
    """
    return tuple(n for n in of if size % n)


@dataclass(frozen=True)
class UnfitFormats:
    """Formats that have no place for a shape, why, and the choice that they could hold."""

    formats: tuple[str, ...]
    why: str
    instead: str


@dataclass(frozen=True)
class LayerPattern:
    """A format whose program counts by itself which layers are of another kind: every `period`-th, `called` so."""

    name: str
    called: str
    period: int

    def holds(self, layers: Sequence[int]) -> bool:
        """Whether each of these source layers has a place of its kind among those that are left."""
        return all(self.is_other(layer) == self.is_other(place) for place, layer in enumerate(layers))

    def is_other(self, place: int) -> bool:
        """Whether a layer in this place is of the other kind."""
        return (place + 1) % self.period == 0

    def near(self, wanted: Sequence[float], depth: int) -> tuple[int, ...]:
        """As many of `depth` layers, each near to the wanted one and of the kind of its new place.

        >>> LayerPattern("", "", 4).near([0, 2.75, 5.5, 8.25, 11], 12)
        (0, 2, 5, 7, 10)
        """
        count = len(wanted)

        def follows(layer: int, place: int) -> bool:
            """Whether the layers behind this one have all that places behind this one need."""
            for other in range(place + 1, count):
                layer = next((i for i in range(layer + 1, depth) if self.is_other(i) == self.is_other(other)), depth)
            return layer < depth

        kept: list[int] = []
        for place, near in enumerate(wanted):
            behind = range(kept[-1] + 1 if kept else 0, depth)
            fitting = [i for i in behind if self.is_other(i) == self.is_other(place) and follows(i, place)]
            kept.append(min(fitting, key=lambda i: abs(i - near)))
        return tuple(kept)


def pattern_of(arch: Architecture, config: Config) -> LayerPattern | None:
    """The pattern by which a format reads the layers of a family; None for none, or where the source does not follow it
    itself.
    """
    for name, families in PATTERNS.items():
        if arch.name in families:
            key, value, called, period = families[arch.name]
            found = LayerPattern(name, called, period)
            kinds = arch.lists(config).get(key)
            if isinstance(kinds, list) and all((k == value) == found.is_other(i) for i, k in enumerate(kinds)):
                return found
    return None


def breaks_pattern(arch: Architecture, config: Config, layers: Sequence[int]) -> UnfitFormats | None:
    """The format whose program would take these source `layers` for others, with layers near to equal spacing that it
    would not. None where there is none.
    """
    pattern, depth, count = pattern_of(arch, config), arch.shape(config).depth, len(layers)
    if pattern is None or pattern.holds(layers) or max(layers) >= depth:
        return None
    there = ", ".join(str(place + 1) for place, layer in enumerate(layers) if pattern.is_other(layer)) or "none"
    nth = f"{pattern.period}{'nd' if pattern.period == 2 else 'th'}"
    why = f"every {nth} layer there is {pattern.called}, and here it would be {there}"
    evenly = pattern.near([place * (depth - 1) / max(1, count - 1) for place in range(count)], depth)
    return UnfitFormats((pattern.name,), why, f"--keep {','.join(map(str, evenly))}")


def cannot_hold(
    before: Architecture, after: Architecture, shape: Shape, config: Config | None = None, layers: Sequence[int] = ()
) -> UnfitFormats | None:
    """The formats that know the family `before` and cannot hold `shape` in the family `after`, or the source `layers`
    that stay of a model with this `config`; None for none.
    """
    if config is not None and layers and (pattern := breaks_pattern(before, config, layers)):
        return pattern
    stage = next((s for s in shape.stages if s.inner != s.width), None)
    if stage is None:
        return None
    family, decoupled = before.name.removeprefix(OURS), after.name.startswith(OURS)
    table = KNOWN if decoupled else UNREAD
    formats = tuple(name for name, families in table.items() if family in families)
    if not formats:
        return None
    why = (
        f"it is {stage.inner:,} wide inside ({stage.heads} heads of {stage.head_dim}), and a {family} there has heads "
        f"of width / heads ({stage.width:,} / {stage.heads})"
    )
    if decoupled and stage.width % stage.heads == 0:
        return UnfitFormats(formats, why, f"--head-dim split ({stage.heads} heads of {stage.width // stage.heads})")
    fitting = stage.width // stage.head_dim
    fits = stage.width % stage.head_dim == 0 and fitting % (1 if decoupled else stage.kv_heads) == 0
    return UnfitFormats(formats, why, f"--heads {fitting}" if fits else "the source's own number of heads")
