"""The numbers that surgery may change, and their arithmetic. No torch here.

A `Shape` is a tuple of `Stage`s (one for BERT, GPT-2 and ViT; four for pyramids such as DaViT). A `ParameterCount`
splits a model's parameters into the four parts that every table of leansurgeon shows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import accumulate

from leansurgeon.errors import UsageError

# Displayed names of a stage's numbers, and of the parts of a parameter count.
NUMBERS = {
    "depth": "layers",
    "heads": "heads",
    "head_dim": "head_dim",
    "kv_heads": "key/value heads",
    "inner": "inner width",
    "mlp_dim": "MLP",
    "width": "width",
}
PARTS = {"embeddings": "embeddings", "attention": "attention", "mlp": "MLP", "rest": "rest", "total": "all"}


@dataclass(frozen=True)
class Stage:
    """A run of `depth` equal blocks. `width` is the embedding dimension, which surgery does not change."""

    depth: int
    heads: int
    head_dim: int
    kv_heads: int
    mlp_dim: int
    width: int

    @property
    def inner(self) -> int:
        """Inner width h*d: the input columns of the attention's output projection."""
        return self.heads * self.head_dim


@dataclass(frozen=True)
class Shape:
    """Depth, heads, head_dim, kv_heads and mlp_dim of every stage."""

    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        for stage in self.stages:
            for field in fields(stage):
                value = getattr(stage, field.name)
                if not isinstance(value, int) or value < 1:
                    raise UsageError(f"{field.name} must be a whole number of at least 1, and {value} was asked for.")
            if stage.heads % stage.kv_heads:
                near = nearest_divisible(stage.heads, stage.kv_heads)
                raise UsageError(
                    f"{stage.heads} heads cannot share {stage.kv_heads} key/value heads evenly; nearest: {near}."
                )

    @property
    def depth(self) -> int:
        return sum(stage.depth for stage in self.stages)

    @property
    def spans(self) -> list[range]:
        """The layer numbers of every stage, counted through all stages."""
        ends = accumulate(stage.depth for stage in self.stages)
        return [range(end - stage.depth, end) for end, stage in zip(ends, self.stages, strict=True)]

    def stage_of(self, layer: int) -> int:
        """Return the number of the stage that a layer belongs to."""
        return next(number for number, span in enumerate(self.spans) if layer in span)

    def with_(self, **changes: int) -> Shape:
        """Return the same shape with a number changed in every stage."""
        return Shape(tuple(replace(stage, **changes) for stage in self.stages))

    def column(self, name: str) -> str:
        """Return one number of every stage as text: `12`, or `4,8,16,32` with several stages."""
        values = [getattr(stage, name) for stage in self.stages]
        return str(values[0]) if len(values) == 1 else ",".join(map(str, values))

    def as_dict(self) -> dict:
        return {"stages": [asdict(stage) | {"inner": stage.inner} for stage in self.stages]}

    @classmethod
    def from_dict(cls, data: dict) -> Shape:
        return cls(tuple(Stage(**{f.name: s[f.name] for f in fields(Stage)}) for s in data["stages"]))


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by part, tied tensors counted once."""

    embeddings: int = 0
    attention: int = 0
    mlp: int = 0
    rest: int = 0

    @property
    def total(self) -> int:
        return self.embeddings + self.attention + self.mlp + self.rest

    def as_dict(self) -> dict:
        return asdict(self) | {"total": self.total}


def nearest_divisible(value: int, by: int) -> str:
    """Return the multiples of `by` on both sides of `value` as text: `"6, 9"`."""
    below, above = value // by * by, -(-value // by) * by
    return ", ".join(str(v) for v in dict.fromkeys((below, above)) if v > 0)


def divisors_near(width: int, heads: int) -> str:
    """Return the two divisors of `width` nearest to `heads` as text: `"6, 8"`."""
    divisors = [d for d in range(1, width + 1) if width % d == 0]
    return ", ".join(map(str, sorted(sorted(divisors, key=lambda d: (abs(d - heads), d))[:2])))


def evenly(depth: int, keep: int) -> tuple[int, ...]:
    """Choose `keep` of `depth` layers at equal spacing, including the first and the last (if only one, the first).

    Of two layers equally near a position it takes the earlier, since later ones do less: 6 -> 3 keeps 0, 2, 5. Both
    ends stay since they do what no other layer does: MiniLM's 6 -> 4 layers have a cosine of 0.79 to the source, and
    0.42 without the last; SmolLM2 at 24 of 30 a loss of 6.0 instead of 8.2.
    """
    if keep < 2:
        return tuple(range(keep))
    return tuple((2 * i * (depth - 1) + keep - 2) // (2 * (keep - 1)) for i in range(keep))


def one_of_each(depth: int, keep: int, *, last: bool = False) -> tuple[int, ...]:
    """Choose the first (`last`: the last) layer of each of `keep` groups of about equal size: 6 -> 3 keeps 0, 2, 4 (1,
    3, 5).

    The first of each was the best fixed rule on trained small ViTs; the last can be worse than starting fresh (digits
    and Fashion-MNIST).
    """
    return tuple((i + last) * depth // keep - last for i in range(keep))


SPACINGS: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "even": evenly,
    "first-of-each": one_of_each,
    "last-of-each": partial(one_of_each, last=True),
}


@dataclass(frozen=True)
class Groups:
    """The layers of a stage, of which `keep` stay, in groups of `period` alternating kinds: layer j of a result must be
    of the same kind as layer j of such a model. `needed` groups stay, the last one cut to `keep`.
    """

    stage: range
    keep: int
    period: int = 1

    @property
    def needed(self) -> int:
        return -(-self.keep // self.period)

    @property
    def all(self) -> list[tuple[int, ...]]:
        """The groups that may stay. An incomplete last group counts only for a result that ends in the same way."""
        whole, rest = divmod(len(self.stage), self.period)
        count = whole + bool(rest and (self.keep % self.period == rest or self.needed > whole))
        return [tuple(self.stage[i * self.period : (i + 1) * self.period]) for i in range(count)]

    @property
    def lost(self) -> int:
        """How many groups are dropped."""
        return len(self.all) - self.needed

    def without(self, gone: Collection[int]) -> list[int]:
        """Return the layers that stay if these layers, in whole groups, are dropped."""
        return [layer for group in self.all for layer in group if layer not in gone][: self.keep]

    def holds(self, layers: Sequence[int]) -> bool:
        """Return whether `layers` has `keep` layers, each at a position of its kind."""
        places = [(j % self.period, layer, layers[j - j % self.period]) for j, layer in enumerate(layers)]
        in_place = ((layer - self.stage.start) % self.period == at == layer - first for at, layer, first in places)
        return len(layers) == self.keep and all(in_place)


def groups_of(before: Shape, after: Shape, period: int = 1) -> list[Groups]:
    """Return the groups of every stage of `before` for the depth in `after`."""
    return [Groups(span, stage.depth, period) for span, stage in zip(before.spans, after.stages, strict=True)]


def evenly_per_stage(before: Shape, after: Shape, period: int = 1, spacing: str = "even") -> tuple[int, ...]:
    """Return the layers kept by one of `SPACINGS`, counted through all stages."""
    kept: list[int] = []
    for groups in groups_of(before, after, period):
        every = groups.all
        staying = [layer for place in SPACINGS[spacing](len(every), groups.needed) for layer in every[place]]
        kept += staying[: groups.keep]
    return tuple(kept)
