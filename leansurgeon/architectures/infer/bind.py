"""A finding and the user's config together are a declaration: every tensor of the real model with its role and axes.

The model is built without memory at its real size, which also checks the finding: an axis that does not have there the
size that its word says takes its kind of surgery away.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leansurgeon.architectures.base import Architecture, Keys, Tensor
from leansurgeon.architectures.infer import roles
from leansurgeon.architectures.infer.differences import Shapes, sizes
from leansurgeon.architectures.infer.finding import Finding, Part, Stage
from leansurgeon.architectures.infer.library import Library
from leansurgeon.architectures.infer.tiny import Config
from leansurgeon.architectures.infer.widened import MODEL_TYPE, lean_class
from leansurgeon.architectures.tensors import Blocks, axis_size, layer_number_pattern, read_key
from leansurgeon.errors import UnsupportedModel
from leansurgeon.reading.jsonfile import JsonObject

if TYPE_CHECKING:
    import torch

Sized = tuple[str, tuple[int, ...]]


@dataclass
class Block:
    """What a stage looks like at its real size: names within a block with their sizes, and the layers that have them.
    Layers of several kinds may have one name in several sizes.
    """

    layers: dict[Sized, list[int]]

    def size(self, template: str) -> tuple[int, ...]:
        """The first size of a tensor."""
        return next(size for name, size in self.layers if name == template)


def declaration(finding: Finding, full: Config, library: Library | None = None) -> Architecture:
    """The declaration of a family for one config, which is whole. Raises `UnsupportedModel`, `Unbuildable`. `library`
    builds its models, where that is not transformers.
    """
    library = library or Library.of(full)
    model = library.build(full, None, "meta")
    shapes = sizes(library, model)
    base = getattr(model, "base_model_prefix", "")
    prefix = f"{base}." if any(s.layer.startswith(f"{base}.") for s in finding.stages) else ""
    own = full[finding.section] if finding.section else full
    beside = {
        n: s
        for n, s in shapes.items()
        if not any(layer_number_pattern(stage.layer).match(n) for stage in finding.stages)
    }
    bound = [BoundStage(stage, block_of(stage, shapes, own), own, beside) for stage in finding.stages]
    stages = [each.blocks(prefix) for each in bound]
    refused = {what: why for each in bound for what, why in each.refused.items()}
    outer = [outer_tensor(n, s, prefix, n in finding.buffers, bound) for n, s in beside.items()]
    prefixes = (prefix, "") if prefix else ("", f"{base}.") if base else ("",)
    uneven = any(len(layers) != own[b.stage.depth_key] for b in bound for layers in b.block.layers.values())
    first = finding.stages[0]
    halves = next((s.halves_trouble for s in finding.stages if s.halves_trouble), "")
    widened = any(s.spec for s in finding.stages) and "heads" not in refused
    return Architecture(
        name=finding.model_type,
        library="transformers",
        model_types=(finding.model_type,),
        keys=stages[0].keys,
        stages=tuple(stages),
        outer=tuple(outer),
        norm=first.norm,
        causal=finding.causal,
        positions="relative",
        skipped_positions=count_skipped_positions(model),
        prefixes=prefixes,
        ignored=tuple(sorted(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())),
        tied=tuple(n for n in library.tied_names(model) if n not in shapes),
        per_layer=tuple(dict.fromkeys(k for s in finding.stages for k in s.lists)),
        period=max(s.period for s in finding.stages),
        counters=first.counters,
        index_lists=first.index_lists,
        forget=("stage_names", "out_features", "out_indices"),
        plain=False,
        uneven=uneven,
        refused=refused,
        evidence=evidence_of(finding, widened),
        section=finding.section,
        taps=first.taps,
        stay=tuple(s.stay for s in finding.stages) if any(s.stay for s in finding.stages) else (),
        stay_last=tuple(s.stay_last for s in finding.stages) if any(s.stay_last for s in finding.stages) else (),
        decoupled=MODEL_TYPE if widened else None,
        shared=("heads",) if widened and halves else (),
        heads_entangled="" if all(s.standard for s in finding.stages) else "has heads of a form that was not declared",
        heads_unsplittable=f"was inferred, and its heads cannot be divided: {halves}" if halves else "",
        bases="".join(pair for pair in ("qk", "vo") if all(pair in s.bases for s in finding.stages)),
        heads_divide_width=any(s.heads_divide_width for s in finding.stages),
    )


def count_skipped_positions(model: torch.nn.Module) -> int:
    """Rows of the table of positions that no token ever has: MPNet's positions begin behind that of padding."""
    tables = (module for name, module in model.named_modules() if "position" in name.rpartition(".")[2])
    paddings = (getattr(table, "padding_idx", None) for table in tables)
    return max((place + 1 for place in paddings if isinstance(place, int)), default=0)


def evidence_of(finding: Finding, widened: bool) -> JsonObject:
    """What was proven, and where heads are `widened` what the modelling file that travels has to know."""
    evidence = finding.evidence()
    if widened:
        in_timm = any(stage.width_at for stage in finding.stages)
        evidence["decoupled"] = {
            "class": finding.cls,
            **({} if in_timm else {"lean_class": lean_class(finding.cls).__name__}),
            "stages": [dict(s.spec) if s.spec else None for s in finding.stages],
        }
    return evidence


def block_of(stage: Stage, shapes: Shapes, full: Config) -> Block:
    block = Block({})
    for name, shape in shapes.items():
        if hit := layer_number_pattern(stage.layer).match(name):
            block.layers.setdefault((name[hit.end() :], shape), []).append(int(hit[1]))
    if not block.layers:
        raise UnsupportedModel(f"The real {full['model_type']} has no tensors named like '{stage.layer}'.")
    return block


class BoundStage:
    """One stage of a finding at its real size."""

    def __init__(self, stage: Stage, block: Block, full: Config, beside: Shapes) -> None:
        self.stage, self.block, self.full, self.beside, self.refused = stage, block, full, beside, {}
        self.heads, self.mlp = stage.heads, stage.mlp
        self.numbers()
        if stage.depth_trouble:
            self.refused["depth"] = stage.depth_trouble
        if stage.heads_trouble or not self.heads:
            self.refused["heads"], self.heads = stage.heads_trouble, None
        if stage.mlp_trouble or not self.mlp:
            self.refused["mlp_dim"], self.mlp = stage.mlp_trouble, None
        self.check()

    def numbers(self) -> None:
        """The sizes of the real stage's axes."""
        s, c = self.stage, self.full
        name, axis = s.width_at or ("", 0)
        self.width = self.block.size(name)[axis] if name else c.get(s.width_key)
        heads = c.get(s.heads_key) if s.heads_key else 1
        kv = read_key(c, s.kv_key) if s.kv_key else None
        head_dim = c.get(s.head_dim_key) if s.head_dim_key else None
        ratio = c.get(s.mlp_key) if s.mlp_key else None
        mlp = int(self.width * ratio) if s.mlp_ratio and ratio else ratio
        head_dim = head_dim or self.width // heads
        kv = kv or heads
        self.dims = {
            **{"width": self.width, "heads": heads, "head_dim": head_dim, "qkv": 3 * head_dim},
            **{"q": heads * head_dim, "kv": kv * head_dim, "mlp": mlp or 4 * self.width},
        }

    def check(self) -> None:
        """Take away what the real sizes contradict."""
        for name, part in (("heads", self.heads), ("mlp_dim", self.mlp)):
            for template, size in (*self.block.layers, *self.beside.items()):
                for axis, word in self.words(template, part):
                    if self.size(word, size[axis]) != size[axis]:
                        self.refused[name] = f"axis {axis} of '{template}' has {size[axis]} entries, not {word}"
        if "heads" in self.refused:
            self.heads = None
        if "mlp_dim" in self.refused:
            self.mlp = None

    def size(self, word: str, real: int) -> int:
        word = self.literal(word, real)
        return axis_size(word, self.dims)

    def literal(self, word: str, real: int) -> str:
        """`heads*24` at the real size, where a head may have other numbers of entries than in the small model."""
        if re.fullmatch(r"heads\*\d+", word):
            return f"heads*{real // self.dims['heads']}"
        return word

    def words(self, template: str, part: Part | None) -> tuple[tuple[int, str], ...]:
        """The words of a tensor's axes; experts beyond those of the small model are like its first."""
        if part is None:
            return ()
        if template in part.axes:
            return part.axes[template]
        first = ".".join("0" if p.isdigit() else p for p in template.split("."))
        return part.axes.get(first, ())

    def is_sink(self, template: str, part: Part | None) -> bool:
        first = ".".join("0" if p.isdigit() else p for p in template.split("."))
        return part is not None and (template in part.sinks or (template not in part.axes and first in part.sinks))

    def blocks(self, prefix: str) -> Blocks:
        sinks = {
            name: [t for t in dict.fromkeys(t for t, _ in self.block.layers) if self.is_sink(t, part)]
            for name, part in (("heads", self.heads), ("mlp", self.mlp))
        }
        tensors = [self.tensor(sized, sinks) for sized in self.block.layers]
        s = self.stage
        keys = Keys(
            s.depth_key,
            s.heads_key or "",
            s.width_key if s.width_key and self.full.get(s.width_key) == self.width else f"={self.width}",
            mlp_dim=None if s.mlp_ratio else s.mlp_key,
            mlp_ratio=s.mlp_key if s.mlp_ratio else None,
            head_dim=s.head_dim_key,
            kv_heads=s.kv_key,
        )
        return Blocks(s.layer.removeprefix(prefix), tuple(tensors), s.projections, keys)

    def tensor(self, sized: Sized, sinks: Mapping[str, list[str]]) -> Tensor:
        (template, size), layers = sized, self.block.layers[sized]
        heads, mlp = self.words(template, self.heads), self.words(template, self.mlp)
        words = dict(heads) | dict(mlp)
        axes = [
            self.literal(words[a], n) if a in words else "width" if n == self.width else str(n)
            for a, n in enumerate(size)
        ]
        module, group = roles.module_of(template), 0
        if heads:
            sink = self.is_sink(template, self.heads)
            role = roles.of_head_tensor(template, [w for _, w in heads], sink, len(size))
            group = roles.nearest(template, sinks["heads"])
        elif mlp:
            role = roles.of_mlp_tensor(template, self.is_sink(template, self.mlp))
            group = roles.nearest(template, sinks["mlp"])
        elif (owner := next((t for t in sinks["heads"] if roles.module_of(t) == module), None)) is not None:
            role, group = "o", sinks["heads"].index(owner)
        elif (owner := next((t for t in sinks["mlp"] if roles.module_of(t) == module), None)) is not None:
            role, group = "down", sinks["mlp"].index(owner)
        else:
            role = "buffer" if template in self.stage.buffers else roles.of_other(template, len(size))
        whole = len(layers) == self.full[self.stage.depth_key]
        return Tensor(template, role, " ".join(axes), group=group, layers=None if whole else tuple(layers))


def outer_tensor(name: str, size: tuple[int, ...], prefix: str, buffer: bool, bound: Sequence[BoundStage]) -> Tensor:
    """A tensor outside the blocks, which may have as many MLP units as they have."""
    inside = name.startswith(prefix)
    beside = "head" if prefix and not inside else "norm" if len(size) <= 1 else "embedding"
    role = "buffer" if buffer else beside
    words = next((dict(b.words(name, b.mlp)) for b in bound if b.words(name, b.mlp)), {})
    if words:
        role = roles.of_mlp_tensor(name, any(name in b.mlp.sinks for b in bound if b.mlp))
    axes = " ".join(words.get(axis, str(n)) for axis, n in enumerate(size))
    return Tensor(name.removeprefix(prefix) if inside else "/" + name, role, axes)
