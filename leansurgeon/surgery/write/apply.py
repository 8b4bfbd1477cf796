"""Carry out a plan: stream every tensor from the source to the output folder, untouched bytes copied, changed ones
built one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from math import prod
from pathlib import Path

import numpy as np

from leansurgeon.architectures.base import Config, TensorSpec
from leansurgeon.architectures.tensors import QK_NORMS
from leansurgeon.checkpoints.family import write_config
from leansurgeon.checkpoints.foreign import companions
from leansurgeon.checkpoints.recorded.decided import Decisions
from leansurgeon.checkpoints.reshaped import FOLLOWERS, at_layer
from leansurgeon.checkpoints.weights import RAW, Out, from_float32, write
from leansurgeon.errors import LeanSurgeonError, UnsupportedModel
from leansurgeon.surgery.layer.balance import Balanced
from leansurgeon.surgery.plan.operators import fresh, heads, mlp
from leansurgeon.surgery.plan.operators.heads import FRESH
from leansurgeon.surgery.plan.planning import Plan

# Roles whose new entries are drawn; those of all others are zero.
NEW_ROWS = ("q", "k", "v", "qk", "qkv", "vkq", "up", "gate", "head_param", "head_mix")


def apply(plan: Plan, folder: Path, edits: Mapping[str, np.ndarray] | None = None) -> Decisions:
    """Write the result of `plan` into `folder`: config, weights, companions. `edits` are tensors (in float32, by their
    names in the result) that calibration has made. Returns what was decided while applying.
    """
    config = plan.target.config(plan.layers)
    if plan.init == "fresh":
        from leansurgeon.checkpoints.model import initialise, save_model

        model = initialise(config, plan.architecture, plan.seed)
        save_model(model, plan.architecture, config, folder)
        decided = Decisions()
    else:
        transfer = Transfer(plan, edits)
        outs, balance = transfer.tensors(), {}
        if plan.method.balance:
            balanced = Balanced(plan.result, outs)
            outs, balance = balanced.tensors(), balanced.record
        write(folder, outs)
        decided = Decisions(kept_heads=transfer.kept_heads, balance=balance)  # both are known when all is written
        write_config(folder, config, plan.architecture)
    if plan.source.folder:
        companions.copy(plan.source.folder, folder)
    return decided


class Transfer:
    """The tensors of the result, each as a copy of bytes or as a function that makes it."""

    def __init__(self, plan: Plan, edits: Mapping[str, np.ndarray] | None = None) -> None:
        self.edits = edits or {}
        self.plan, self.source, self.weights = plan, plan.source, plan.source.weights
        self.by_layer: dict[int | None, dict[str, TensorSpec]] = {}
        for spec in self.source.specs:
            self.by_layer.setdefault(spec.layer, {})[self.template(spec)] = spec
        self.outside = self.by_layer.get(None, {})
        self.indices: dict[tuple[int, int], LayerIndex] = {}
        self.strengths: dict[tuple[int, int], np.ndarray] = {}
        self.kept_heads: dict[str, tuple[int, ...]] = {}  # those that weights or measured importance choose

    def template(self, spec: TensorSpec) -> str:
        """The tensor's name within its block; outside the blocks its name."""
        return spec.name if spec.layer is None else at_layer(spec, self.source.architecture, 0)

    def index(self, spec: TensorSpec) -> LayerIndex:
        """Where heads and units of a source tensor go: one map for every attention or MLP of a layer."""
        key = (spec.layer, spec.group)
        if key not in self.indices:
            self.indices[key] = LayerIndex(self, spec)
        return self.indices[key]

    def tensors(self) -> list[Out]:
        """The tensors of the result in its own order, each made when it is written."""
        outs = []
        for target in self.plan.result.specs:
            spec = self.outside[target.name] if target.layer is None else self.origin(target)
            stays = target.layer is None and spec.role not in FOLLOWERS
            outs.append(self.copy(target, spec) if stays else self.block_tensor(target, spec, self.index(spec)))
        return outs

    def origin(self, target: TensorSpec) -> TensorSpec:
        """The source tensor that becomes `target`. What only the first layer of a stage holds (T5's table of positions)
        stays with the stage when that layer goes.
        """
        template, old = self.template(target), self.plan.layers[target.layer]
        if template in self.by_layer[old]:
            return self.by_layer[old][template]
        first = self.plan.before.spans[target.stage].start
        return replace(self.by_layer[first][template], layer=old)

    def copy(self, target: TensorSpec, spec: TensorSpec) -> Out:
        """The source's tensor, copied byte for byte."""
        entry = self.weights.entries[spec.name]
        return Out(target.name, entry.dtype, entry.shape, entry=entry)

    def block_tensor(self, target: TensorSpec, spec: TensorSpec, index: LayerIndex) -> Out:
        """A block's tensor: edited, copied, fresh or gathered from the old one."""
        entry = self.weights.entries[spec.name]
        if target.name in self.edits:
            return Out(target.name, entry.dtype, target.shape, make=partial(self.edited, target, entry.dtype))
        if index.fresh_attention and (
            target.role in ("q", "k", "v", "qk", "qkv", "vkq", "head_param", "head_mix", *QK_NORMS)
            or (target.shape != entry.shape and target.role == "o")
        ):
            if self.plan.init == "transfer" and self.source.learned:
                raise LeanSurgeonError(
                    f"'{target.name}' should come from the source's heads, and nothing says how.",
                    "This is an error of leansurgeon itself; --init fresh-attention starts q, k, v afresh.",
                )
            return Out(target.name, entry.dtype, target.shape, make=partial(self.all_fresh, target, entry.dtype))
        if index.fresh_attention and target.role == "o":  # of the same size: its columns belong to no head any more
            return self.copy(target, spec)
        if all(index.same(axis) for axis in spec.axes):
            return self.copy(target, spec)
        make = partial(self.gathered, target, spec, entry.dtype, index)
        return Out(target.name, entry.dtype, target.shape, make=make)

    def edited(self, target: TensorSpec, dtype: str) -> np.ndarray:
        """The tensor that the walk has edited, in `dtype`."""
        return from_float32(np.ascontiguousarray(self.edits[target.name], dtype=np.float32), dtype)

    def gathered(self, target: TensorSpec, spec: TensorSpec, dtype: str, index: LayerIndex) -> np.ndarray:
        """Old entries at their new places; the others drawn or zero."""
        picks = [index.of(axis, size, spec.role) for axis, size in zip(spec.axes, spec.shape, strict=True)]
        fresh_at = [np.flatnonzero(pick == FRESH) for pick in picks]
        new = self.background(target, dtype, fresh_at)
        places = [np.flatnonzero(pick != FRESH) for pick in picks]
        if target.role == "head_mix":  # old heads hear nothing of new ones
            new[places[0]] = 0
        move(new, places, self.weights.raw(spec.name), [p[at] for p, at in zip(picks, places, strict=True)])
        return new

    def background(self, target: TensorSpec, dtype: str, fresh_at: list[np.ndarray]) -> np.ndarray:
        """A tensor whose new places (by axis) hold what new entries start with, and the others anything."""
        if target.new is not None:
            return from_float32(np.full(target.shape, target.new, np.float32), dtype)
        new = np.zeros(target.shape, RAW[dtype])
        grown = [axis for axis, at in enumerate(fresh_at) if len(at)]
        if not grown or target.role not in NEW_ROWS or len(target.shape) == 1:
            return new
        if len(grown) > 1:
            return from_float32(self.drawn(target), dtype)
        at, rows = fresh_at[grown[0]], np.moveaxis(new, grown[0], 0)
        start = 0
        for values in fresh.pieces(len(at), rows.shape[1:], self.std(target), self.plan.seed, target.name):
            rows[run(at[start : start + len(values)])] = from_float32(values, dtype)
            start += len(values)
        return new

    def all_fresh(self, target: TensorSpec, dtype: str) -> np.ndarray:
        """The tensor made anew: norms of q and k one, other vectors zero, matrices normal."""
        if target.new is not None:
            values = np.full(target.shape, target.new, np.float32)
        elif target.role in QK_NORMS:
            values = np.ones(target.shape, np.float32)
        elif len(target.shape) == 1:
            values = np.zeros(target.shape, np.float32)
        else:
            values = self.drawn(target)
        return from_float32(values, dtype)

    def drawn(self, target: TensorSpec) -> np.ndarray:
        """New entries with the library's standard deviation."""
        return fresh.normal(target.shape, self.std(target), self.plan.seed, target.name)

    def std(self, target: TensorSpec) -> float:
        """Standard deviation of fresh weights by the config; 0.02 where it says none."""
        return self.plan.architecture.std(self.config, target.role) or 0.02

    @cached_property
    def config(self) -> Config:
        """The config of the result, its keys at the top."""
        return self.plan.architecture.flat(self.plan.target.config(self.plan.layers))


class LayerIndex:
    """For one attention or MLP of one source layer: where the entries of every axis come from. Heads and units by
    weight are chosen here, on first use.
    """

    def __init__(self, transfer: Transfer, spec: TensorSpec) -> None:
        self.t, self.layer, self.stage, self.group = transfer, spec.layer, spec.stage, spec.group
        self.before, self.after = transfer.plan.before.stages[spec.stage], transfer.plan.after.stages[spec.stage]
        self.fresh_attention = self.before.head_dim != self.after.head_dim

    def same(self, axis: str) -> bool:
        """Whether nothing changes along this axis."""
        before, after = self.before, self.after
        changed = set()
        if before.heads != after.heads:
            changed |= {"q", "heads"}
        if before.kv_heads != after.kv_heads:
            changed.add("kv")
        if before.mlp_dim != after.mlp_dim:
            changed.add("mlp")
        return not changed & {factor for part in axis.split("+") for factor in part.split("*")}

    def of(self, axis: str, size: int, role: str = "") -> np.ndarray:
        """Old place of every new entry along an axis (stacked parts one after the other); FRESH where there is none."""
        if self.same(axis):
            return np.arange(size)
        pieces, offset = [], 0
        for part in axis.split("+"):
            index, old_size = self.part(part)
            if role == "o" and part == "q" and self.splits:
                index = heads.split_map(self.before, self.after)[2]
            pieces.append(np.where(index == FRESH, FRESH, index + offset))
            offset += old_size
        return np.concatenate(pieces)

    def part(self, name: str) -> tuple[np.ndarray, int]:
        """(new,) old place of every new one along an axis, and how many old places there are."""
        queries, values = self.head_maps
        if name == "q":
            return spread(queries, self.before.head_dim), self.before.inner
        if name == "kv":
            return spread(values, self.before.head_dim), self.before.kv_heads * self.before.head_dim
        if name == "mlp":
            return self.units, self.before.mlp_dim
        if name.startswith("mlp*"):
            each = int(name[4:])
            return spread(self.units, each), self.before.mlp_dim * each
        first, *others = name.split("*")
        assert first == "heads", name
        each = prod(int(f) if f.isdigit() else {"head_dim": 1, "qkv": 3}[f] * self.before.head_dim for f in others)
        return spread(queries, each), self.before.heads * each

    @property
    def splits(self) -> bool:
        """Whether old heads have children, instead of new heads beside them."""
        return self.t.plan.method.more == "split" and self.after.heads > self.before.heads

    @cached_property
    def head_maps(self) -> tuple[np.ndarray, np.ndarray]:
        """The old head of every new query head, and of every new key and value head."""
        before, after = self.before, self.after
        if self.splits:
            return heads.split_map(before, after)[:2]
        if after.heads >= before.heads:
            return heads.add_map(before, after)
        chosen = heads.trim_map(before, after, self.strength)
        self.t.kept_heads[self.name] = tuple(chosen[0].tolist())
        return chosen

    def choose_heads(self, kept: np.ndarray) -> None:
        """Keep these heads, instead of those that the weights alone suggest."""
        groups = np.unique(kept // (self.before.heads // self.before.kv_heads))  # those that keep any
        self.head_maps = (kept, groups)

    @property
    def strength(self) -> np.ndarray:
        """One number a head: as measured, else by weight. Where the layers of a stage must keep the same heads, the sum
        over those that are kept.
        """
        if (measured := self.t.plan.strength.get((self.layer, self.group))) is not None:
            return measured
        if not self.t.source.architecture.blocks(self.stage).in_step(self.group):
            return heads.strength(self.matrix("o", "q", last=True), self.before.heads)
        if (self.stage, self.group) not in self.t.strengths:
            span = self.t.plan.before.spans[self.stage]
            kept = [i for i in self.t.plan.layers if i in span]
            strengths = [heads.strength(self.matrix("o", "q", last=True, layer=i), self.before.heads) for i in kept]
            self.t.strengths[self.stage, self.group] = np.sum(strengths, axis=0)
        return self.t.strengths[self.stage, self.group]

    @cached_property
    def units(self) -> np.ndarray:
        """(new,) old MLP unit of every new one, FRESH for added ones."""
        before, after = self.before, self.after
        if after.mlp_dim >= before.mlp_dim:
            return mlp.widen(before.mlp_dim, after.mlp_dim)
        incoming = [self.matrix(role, "mlp", last=False) for role in ("up", "gate") if self.tensors(role)]
        return mlp.strongest(
            [part for m in incoming for part in np.split(m, len(m) // before.mlp_dim)],
            self.matrix("down", "mlp", last=True),
            after.mlp_dim,
        )

    @property
    def name(self) -> str:
        """The layer as surgery.json knows it; `3.1` for the second attention of a layer."""
        layer = "outside" if self.layer is None else self.layer
        return f"{layer}.{self.group}" if self.group else str(layer)

    def tensors(self, role: str, layer: int | None = None) -> list[TensorSpec]:
        """The layer's tensors of one role."""
        specs = self.t.by_layer[self.layer if layer is None else layer].values()
        return [s for s in specs if s.role == role and s.group == self.group]

    def matrix(self, role: str, axis: str, *, last: bool, layer: int | None = None) -> np.ndarray:
        """The weight matrix of a role in float32, turned so that `axis` is its last or first dimension."""
        spec = next((s for s in self.tensors(role, layer) if prod(s.shape[2:]) == 1 < len(s.shape)), None)
        if spec is None:
            raise UnsupportedModel(
                f"Layer {self.name} has no plain matrix '{role}', so its weights do not say what is strong.",
                "Units and heads of it can be added, and layers dropped.",
            )
        values = self.t.weights.float32(spec.name).reshape(spec.shape[:2])  # a convolution of 1x1 is one, too
        at = next(i for i, a in enumerate(spec.axes) if axis in a.split("+"))
        return values if (at == 1) == last else values.T


def spread(chosen: np.ndarray, each: int) -> np.ndarray:
    """A map of heads as a map of their entries, `each` a head, side by side."""
    places = np.repeat(chosen, each) * each + np.tile(np.arange(each), len(chosen))
    return np.where(np.repeat(chosen, each) == FRESH, FRESH, places)


def run(places: np.ndarray) -> np.ndarray | slice:
    """Places along an axis; neighbours in their order as a slice, which numpy copies much faster."""
    if len(places) and int(places[-1]) - int(places[0]) == len(places) - 1 and (np.diff(places) == 1).all():
        return slice(int(places[0]), int(places[-1]) + 1)
    return places


def move(new: np.ndarray, places: list[np.ndarray], old: np.ndarray, origins: list[np.ndarray]) -> None:
    """`new[places] = old[origins]` along every axis; at most one axis is not a slice in nearly all cases."""
    to, of = [run(p) for p in places], [run(p) for p in origins]
    if sum(isinstance(x, np.ndarray) for x in to) <= 1 and sum(isinstance(x, np.ndarray) for x in of) <= 1:
        new[tuple(to)] = old[tuple(of)]
    else:
        new[np.ix_(*places)] = old[np.ix_(*origins)]
