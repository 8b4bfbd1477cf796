"""A model at another shape: a family that holds it, its config, every tensor with its name and sizes. No torch.

Made once by the plan and carried by it; whoever carries a plan out asks here and works nothing out again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from leansurgeon.architectures.base import Architecture, Config, TensorSpec, sizes_of
from leansurgeon.architectures.tensors import count_parameters
from leansurgeon.checkpoints.family import convert_config
from leansurgeon.checkpoints.source import Source
from leansurgeon.shape import ParameterCount, Shape, evenly_per_stage

# Roles whose tensors have the shape of the blocks also where they stand outside them (SigLIP's pooling head).
FOLLOWERS = ("q", "k", "v", "qkv", "o", "up", "gate", "down")


@dataclass(frozen=True)
class Reshaped:
    """`source` at another `shape`, held by `architecture`: its own family or the decoupled form of it."""

    source: Source
    architecture: Architecture
    shape: Shape
    kept: tuple[int, ...] | None = None  # the source layers that stay, where they are of several kinds

    def at(self, shape: Shape) -> Reshaped:
        """The same model at yet another shape, in the same family."""
        return self if shape == self.shape else replace(self, shape=shape)

    def keeping(self, layers: Sequence[int]) -> Reshaped:
        """The same model made of these source layers, which matters where they are of several kinds."""
        same = not self.source.architecture.uneven or self.kept == tuple(layers)
        return self if same else replace(self, kept=tuple(layers))

    @cached_property
    def converted(self) -> Config:
        """The source's config as a config of the family, its shape still the source's."""
        return convert_config(self.source.config, self.source.architecture, self.architecture)

    def config(self, layers: Sequence[int] | None = None) -> Config:
        """The config of the result; `layers` are the source layers that it keeps, where the config lists something for
        every layer. Raises `UsageError` where no config can hold the shape.
        """
        return self.architecture.with_shape(self.converted, self.shape, layers)

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Every tensor of the result: those outside the blocks as they are (but for an attention or MLP there, which
        has the shape of the blocks), those of the first source layer at each new layer. Where
        layers are of several kinds, those of the `kept` layers (by default layers at equal spacing).
        """
        source, shape, arch = self.source, self.shape, self.architecture
        dims = arch.dims(self.converted, shape)
        specs = [
            replace(s, shape=sizes_of(s.axes, dims)) if s.role in FOLLOWERS else s
            for s in source.specs
            if s.layer is None
        ]
        blocks = {}
        for layer, (stage, index, like) in enumerate(self._places()):
            if (stage, like) not in blocks:
                dims = arch.dims(self.converted, shape, stage)
                blocks[stage, like] = [(spec, sizes_of(spec.axes, dims)) for spec in source.specs if spec.layer == like]
            specs += [
                replace(spec, name=at_layer(spec, arch, index), shape=sizes, layer=layer, index=index)
                for spec, sizes in blocks[stage, like]
            ]
        return tuple(specs)

    def _places(self) -> Iterator[tuple[int, int, int]]:
        """Of every new layer its stage, its place there, and the source layer whose tensors it has."""
        source, kept = self.source, self.kept
        if kept is None or len(kept) != self.shape.depth:
            kept = evenly_per_stage(source.shape, self.shape) if source.architecture.uneven else ()
        for stage, (now, wanted) in enumerate(zip(source.shape.spans, self.shape.spans, strict=True)):
            for index, layer in enumerate(wanted):
                # Of layers that are of one kind, only the first may differ from the others.
                yield stage, index, kept[layer] if source.architecture.uneven else now[min(index, 1, len(now) - 1)]

    @cached_property
    def by_layer(self) -> Mapping[int | None, tuple[TensorSpec, ...]]:
        """The tensors of every layer, counted through all stages; None holds those outside the blocks."""
        specs_of_layer = {}
        for spec in self.specs:
            specs_of_layer.setdefault(spec.layer, []).append(spec)
        return {layer: tuple(specs) for layer, specs in specs_of_layer.items()}

    @property
    def parameters(self) -> ParameterCount:
        """Parameters by part, from the tensors' axes alone."""
        return count_parameters(self.specs)


def at_layer(spec: TensorSpec, architecture: Architecture, index: int) -> str:
    """The name of a block tensor in another layer of its stage."""
    pattern = architecture.blocks(spec.stage).layer
    return spec.name.replace(pattern.format(i=spec.index), pattern.format(i=index), 1)


def within_block(spec: TensorSpec, architecture: Architecture) -> str:
    """A tensor's name without its block's."""
    return spec.name.split(architecture.blocks(spec.stage).layer.format(i=spec.index), 1)[1]
