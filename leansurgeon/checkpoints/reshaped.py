"""A model at another shape: its family, its config, and every tensor with name and shape. Imports no torch.

The plan makes it once and carries it; code that executes the plan reads it here instead of deriving it again.
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

# Roles whose tensors have the shape of the blocks even outside them (SigLIP's pooling head).
FOLLOWERS = ("q", "k", "v", "qkv", "o", "up", "gate", "down")


@dataclass(frozen=True)
class Reshaped:
    """`source` at another `shape`, expressed in `architecture`: its own family or the decoupled form of it."""

    source: Source
    architecture: Architecture
    shape: Shape
    kept: tuple[int, ...] | None = None  # the source layers that stay, for models with several kinds of layers

    def at(self, shape: Shape) -> Reshaped:
        """Return the same model at yet another shape, in the same family."""
        return self if shape == self.shape else replace(self, shape=shape)

    def keeping(self, layers: Sequence[int]) -> Reshaped:
        """Return the model made of these source layers, which matters if they are of several kinds."""
        same = not self.source.architecture.uneven or self.kept == tuple(layers)
        return self if same else replace(self, kept=tuple(layers))

    @cached_property
    def converted(self) -> Config:
        """The source's config converted to the family, still with the source's shape."""
        return convert_config(self.source.config, self.source.architecture, self.architecture)

    def config(self, layers: Sequence[int] | None = None) -> Config:
        """Return the config of the result.

        `layers` are the source layers that it keeps, for configs that list something per layer. Raises `UsageError` if
        no config can express the shape.
        """
        return self.architecture.with_shape(self.converted, self.shape, layers)

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Every tensor of the result.

        Outside the blocks they are unchanged (except that an attention or MLP there takes the shape of the blocks).
        Every new layer has the tensors of the first source layers or, if layers are of several kinds, those of its
        `kept` layer (by default at equal spacing).
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
        """Yield for every new layer its stage, its index there, and the source layer whose tensors it has."""
        source, kept = self.source, self.kept
        if kept is None or len(kept) != self.shape.depth:
            kept = evenly_per_stage(source.shape, self.shape) if source.architecture.uneven else ()
        for stage, (now, wanted) in enumerate(zip(source.shape.spans, self.shape.spans, strict=True)):
            for index, layer in enumerate(wanted):
                # If all layers are of one kind, only the first may differ from the others.
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
        """Parameters by part, computed from the tensors' axes."""
        return count_parameters(self.specs)


def at_layer(spec: TensorSpec, architecture: Architecture, index: int) -> str:
    """Return the name of a block tensor in another layer of its stage."""
    pattern = architecture.blocks(spec.stage).layer
    return spec.name.replace(pattern.format(i=spec.index), pattern.format(i=index), 1)


def within_block(spec: TensorSpec, architecture: Architecture) -> str:
    """Return a tensor's name without its block's."""
    return spec.name.split(architecture.blocks(spec.stage).layer.format(i=spec.index), 1)[1]
