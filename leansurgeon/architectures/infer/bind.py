"""Combine a finding with the user's config into a declaration: every tensor of the real model with its role and axes.

The model is built at its real size on meta, which also checks the finding: if an axis does not have the size that its
word implies, that kind of surgery is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from leansurgeon.architectures.base import Architecture, Keys, Tensor, read_stage
from leansurgeon.architectures.infer import roles
from leansurgeon.architectures.infer.differences import Shapes, sizes
from leansurgeon.architectures.infer.finding import Finding, Part, Stage
from leansurgeon.architectures.infer.library import Library
from leansurgeon.architectures.infer.tiny import Config
from leansurgeon.architectures.infer.widened import MODEL_TYPE, lean_class
from leansurgeon.architectures.tensors import Blocks, axis_size, layer_number_pattern, stage_sizes
from leansurgeon.errors import UnsupportedModel


def declaration(finding: Finding, full: Config, library: Library | None = None) -> Architecture:
    """Return the declaration of a family for one complete config.

    `library` builds its models if that is not transformers. Raises `UnsupportedModel` or `Unbuildable`.
    """
    library = library or Library.of(full)
    model, found = library.build(full, None, "meta"), finding.stages
    shapes = sizes(library, model)
    base = getattr(model, "base_model_prefix", "")
    prefix = f"{base}." if any(s.layer.startswith(f"{base}.") for s in found) else ""
    own = full[finding.section] if finding.section else full
    patterns = [layer_number_pattern(stage.layer) for stage in found]
    beside = {n: s for n, s in shapes.items() if not any(pattern.match(n) for pattern in patterns)}
    bound = [BoundStage(stage, shapes, own, beside) for stage in found]
    stages = [each.blocks(prefix) for each in bound]
    refused = {what: why for each in bound for what, why in each.refused.items()}
    outer = [outer_tensor(n, s, prefix, n in finding.buffers, bound) for n, s in beside.items()]
    prefixes = (prefix, "") if prefix else ("", f"{base}.") if base else ("",)
    uneven = any(len(layers) != own[b.stage.depth_key] for b in bound for layers in b.layers.values())
    first = found[0]
    stay, stay_last = (tuple(getattr(s, name) for s in found) for name in ("stay", "stay_last"))
    halves = next((s.halves_trouble for s in found if s.halves_trouble), "")
    widened = any(s.spec for s in found) and "heads" not in refused
    evidence = finding.evidence()
    if widened:  # what the modelling file needs to know
        in_timm = any(stage.width_at for stage in found)
        evidence["decoupled"] = {
            "class": finding.cls,
            **({} if in_timm else {"lean_class": lean_class(finding.cls).__name__}),
            "stages": [dict(s.spec) if s.spec else None for s in found],
        }
    # Rows of the position table that no token uses: MPNet's positions start after that of padding.
    tables = (module for name, module in model.named_modules() if "position" in name.rpartition(".")[2])
    paddings = (getattr(table, "padding_idx", None) for table in tables)
    skipped = max((place + 1 for place in paddings if isinstance(place, int)), default=0)
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
        skipped_positions=skipped,
        prefixes=prefixes,
        ignored=tuple(sorted(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())),
        tied=tuple(n for n in library.tied_names(model) if n not in shapes),
        per_layer=tuple(dict.fromkeys(k for s in found for k in s.lists)),
        period=max(s.period for s in found),
        counters=first.counters,
        index_lists=first.index_lists,
        forget=("stage_names", "out_features", "out_indices"),
        plain=False,
        uneven=uneven,
        refused=refused,
        evidence=evidence,
        section=finding.section,
        taps=first.taps,
        stay=stay if any(stay) else (),
        stay_last=stay_last if any(stay_last) else (),
        decoupled=MODEL_TYPE if widened else None,
        shared=("heads",) if widened and halves else (),
        heads_entangled="" if all(s.standard for s in found) else "has heads of a form that was not declared",
        heads_unsplittable=f"was inferred, and its heads cannot be divided: {halves}" if halves else "",
        bases="".join(pair for pair in ("qk", "vo") if all(pair in s.bases for s in found)),
        heads_divide_width=any(s.heads_divide_width for s in found),
    )


def known_name(template: str, part: Part) -> str:
    """Return a tensor's name in the small model, where further experts have the names of its first."""
    return template if template in part.axes else ".".join("0" if p.isdigit() else p for p in template.split("."))


class BoundStage:
    """One stage of a finding at its real size: tensor names within a block, their sizes, and the layers that have them.

    In layers of several kinds, one name may have several sizes.
    """

    def __init__(self, stage: Stage, shapes: Shapes, full: Config, beside: Shapes) -> None:
        self.stage, self.full, self.beside, self.refused = stage, full, beside, {}
        self.layers: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for name, size in shapes.items():
            if hit := layer_number_pattern(stage.layer).match(name):
                self.layers.setdefault((name[hit.end() :], size), []).append(int(hit[1]))
        if not self.layers:
            raise UnsupportedModel(f"The real {full['model_type']} has no tensors named like '{stage.layer}'.")
        width = full.get(stage.width_key)
        if stage.width_at:
            name, axis = stage.width_at
            width = next(size[axis] for template, size in self.layers if template == name)
        self.keys = Keys(
            stage.depth_key,
            stage.heads_key or "",
            stage.width_key if full.get(stage.width_key) == width else f"={width}",
            mlp_dim=None if stage.mlp_ratio else stage.mlp_key,
            mlp_ratio=stage.mlp_key if stage.mlp_ratio else None,
            head_dim=stage.head_dim_key,
            kv_heads=stage.kv_key,
        )
        self.dims = stage_sizes(read_stage(full, self.keys))
        if stage.depth_trouble:
            self.refused["depth"] = stage.depth_trouble
        self.heads = self.able("heads", stage.heads, stage.heads_trouble)
        self.mlp = self.able("mlp_dim", stage.mlp, stage.mlp_trouble)

    def able(self, kind: str, part: Part | None, trouble: str) -> Part | None:
        """Return the units of a kind; None if they must not change, by `trouble` or because real sizes disagree."""
        wrong = [] if part and not trouble else [trouble]
        for template, size in () if wrong else (*self.layers, *self.beside.items()):
            for axis, word in self.words(template, part):
                if axis_size(self.literal(word, size[axis]), self.dims) != size[axis]:
                    wrong.append(f"axis {axis} of '{template}' has {size[axis]} entries, not {word}")
        if wrong:
            self.refused[kind] = wrong[-1]
        return None if wrong else part

    def literal(self, word: str, real: int) -> str:
        """Return `heads*24` for the real size: a head may have another number of entries than in the small model."""
        return f"heads*{real // self.dims['heads']}" if re.fullmatch(r"heads\*\d+", word) else word

    def words(self, template: str, part: Part | None) -> tuple[tuple[int, str], ...]:
        """Return the words of a tensor's axes."""
        return part.axes.get(known_name(template, part), ()) if part else ()

    def is_sink(self, template: str, part: Part | None) -> bool:
        return part is not None and known_name(template, part) in part.sinks

    def blocks(self, prefix: str) -> Blocks:
        templates = dict.fromkeys(template for template, _ in self.layers)
        sinks = [[t for t in templates if self.is_sink(t, part)] for part in (self.heads, self.mlp)]
        tensors = tuple(self.tensor(*sized, *sinks) for sized in self.layers)
        return Blocks(self.stage.layer.removeprefix(prefix), tensors, self.stage.projections, self.keys)

    def tensor(self, template: str, size: tuple[int, ...], outs: list[str], downs: list[str]) -> Tensor:
        """Return the template of a block tensor; `outs` and `downs` are output projections of attentions and MLPs."""
        layers = self.layers[template, size]
        heads, mlp = self.words(template, self.heads), self.words(template, self.mlp)
        words = dict(heads) | dict(mlp)
        axes = [
            self.literal(words[a], n) if a in words else "width" if n == self.dims["width"] else str(n)
            for a, n in enumerate(size)
        ]
        module, group = roles.module_of(template), 0
        if heads:
            sink = self.is_sink(template, self.heads)
            role = roles.of_head_tensor(template, [w for _, w in heads], sink, len(size))
            group = roles.nearest(template, outs)
        elif mlp:
            role = roles.of_mlp_tensor(template, self.is_sink(template, self.mlp))
            group = roles.nearest(template, downs)
        elif module in (of_outs := [roles.module_of(t) for t in outs]):
            role, group = "o", of_outs.index(module)
        elif module in (of_downs := [roles.module_of(t) for t in downs]):
            role, group = "down", of_downs.index(module)
        else:
            role = "buffer" if template in self.stage.buffers else roles.of_other(template, len(size))
        whole = len(layers) == self.full[self.stage.depth_key]
        return Tensor(template, role, tuple(axes), group=group, layers=None if whole else tuple(layers))


def outer_tensor(name: str, size: tuple[int, ...], prefix: str, buffer: bool, bound: Sequence[BoundStage]) -> Tensor:
    """Return the template of a tensor outside the blocks, which may have as many MLP units as they have."""
    inside = name.startswith(prefix)
    beside = "head" if prefix and not inside else "norm" if len(size) <= 1 else "embedding"
    role = "buffer" if buffer else beside
    words = next((dict(b.words(name, b.mlp)) for b in bound if b.words(name, b.mlp)), {})
    if words:
        role = roles.of_mlp_tensor(name, any(name in b.mlp.sinks for b in bound if b.mlp))
    axes = tuple(words.get(axis, str(n)) for axis, n in enumerate(size))
    return Tensor(name.removeprefix(prefix) if inside else "/" + name, role, axes)
