"""Carry out a plan: stream every tensor from the source to the output folder. Unchanged bytes are copied, changed
tensors built one at a time. Uses numpy only.

For every attention or MLP of a source layer, one index map says where the entries of each axis come from; `undo` reads
the same maps in reverse. Adding is exact: a new head has random queries, keys and values, and zero columns in the
output projection, so its output is zero until it is trained (Gesmundo & Maile, arXiv 2308.06103). Splitting is exact,
too: every child has its parent's queries, keys and values, and the parent's columns of the output projection are
divided among the children. Different slices give the children different gradients from the first step (equal halves
would not: LEMON, arXiv 2310.07999). With grouped attention both leave the key/value heads unchanged, so the cache does
not grow.
"""

from __future__ import annotations

import hashlib
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from math import prod
from pathlib import Path

import numpy as np

from leansurgeon.architectures.axes import FRESH, map_added_heads, map_entries, widen
from leansurgeon.architectures.base import TensorSpec
from leansurgeon.architectures.tensors import QK_NORMS
from leansurgeon.checkpoints.family import write_config
from leansurgeon.checkpoints.foreign import companions
from leansurgeon.checkpoints.recorded.decided import Decisions
from leansurgeon.checkpoints.reshaped import FOLLOWERS, at_layer
from leansurgeon.checkpoints.weights import RAW, Arrays, TensorOut, from_float32, write
from leansurgeon.errors import UnsupportedModel
from leansurgeon.shape import Stage
from leansurgeon.surgery import canonical, split_heads
from leansurgeon.surgery.balance import balance_tensors
from leansurgeon.surgery.planning import Plan

Array = np.ndarray
PIECE = 1 << 18  # values drawn at once (1 MiB)
# Roles whose new entries are drawn at random; those of all others are zero.
NEW_ROWS = ("q", "k", "v", "qk", "qkv", "vkq", "up", "gate", "head_param", "head_mix")
# Roles that belong to heads of one size.
OF_HEADS = ("q", "k", "v", "qk", "qkv", "vkq", "head_param", "head_mix", *QK_NORMS)


def apply(plan: Plan, folder: Path, edits: Mapping[str, Array] | None = None) -> Decisions:
    """Write the result of `plan` into `folder`: config, weights, companion files. `edits` are tensors made by
    calibration (float32, by their names in the result). Return what was decided while writing.
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
        write(folder, balance_tensors(plan.result, outs, balance) if plan.method.balance else outs)
        decided = Decisions(kept_heads=transfer.kept_heads, balance=balance)  # both are complete only after writing
        write_config(folder, config, plan.architecture)
    if plan.source.folder:
        companions.copy(plan.source.folder, folder)
    return decided


class Transfer:
    """The tensors of the result, each as a copy of bytes or as a function that makes it. `edits` come from sample data;
    `split` are heads of another size made from the weights alone.
    """

    def __init__(self, plan: Plan, edits: Mapping[str, Array] | None = None) -> None:
        self.plan, self.source, self.weights = plan, plan.source, plan.source.weights
        keeps = plan.init == "transfer" and plan.source.learned  # else heads of another size are initialized anew
        resized = [
            a.head_dim != b.head_dim and keeps for a, b in zip(plan.before.stages, plan.after.stages, strict=True)
        ]
        specs = canonical.of_attention(plan.result.specs) if any(resized) else ()
        self.split = canonical.LayerTensors((s for s in specs if resized[s.stage]), self.split_layer)
        self.edits = ChainMap(edits or {}, self.split)
        self.by_layer: dict[int | None, dict[str, TensorSpec]] = {}
        for spec in self.source.specs:
            self.by_layer.setdefault(spec.layer, {})[self.template(spec)] = spec
        self.maps: dict[tuple[int | None, int], LayerMaps] = {}
        self.strengths: dict[tuple[int | None, ...], Array] = {}
        self.kept_heads: dict[str, tuple[int, ...]] = {}  # those chosen by weights or measured importance

    def template(self, spec: TensorSpec) -> str:
        """Return the tensor's name within its block; outside the blocks its full name."""
        return spec.name if spec.layer is None else at_layer(spec, self.source.architecture, 0)

    def maps_of(self, spec: TensorSpec) -> LayerMaps:
        """Return the map of heads and units of a source tensor: one for every attention or MLP of a layer."""
        key = (spec.layer, spec.group)
        if key not in self.maps:
            self.maps[key] = LayerMaps(self, spec)
        return self.maps[key]

    def picks(self, spec: TensorSpec) -> list[Array] | None:
        """Return the old index of every new entry of a source tensor, by axis; None if nothing moves."""
        maps = self.maps_of(spec)
        if (spec.layer is None and spec.role not in FOLLOWERS) or not any(map(maps.moves, spec.axes)):
            return None
        return [maps.places(*axis, spec.role) for axis in zip(spec.axes, spec.shape, strict=True)]

    def tensors(self) -> list[TensorOut]:
        """Return the tensors of the result in its own order; each is made when it is written."""
        outs = []
        for target in self.plan.result.specs:
            spec = self.origin(target)
            entry, maps, make = self.weights.entries[spec.name], self.maps_of(spec), None
            changes = spec.layer is not None or spec.role in FOLLOWERS
            resized = changes and maps.before.head_dim != maps.after.head_dim
            if changes and target.name in self.edits:
                make = partial(self.make_edited, target.name, entry.dtype)
            elif resized and (target.role in OF_HEADS or (target.role == "o" and target.shape != entry.shape)):
                make = partial(self.make_afresh, target, entry.dtype)
            elif resized and target.role == "o":
                make = None  # same size: its columns no longer belong to particular heads
            elif changes and any(map(maps.moves, spec.axes)):
                make = partial(self.gather, target, spec, entry.dtype)
            if make is None:
                outs.append(TensorOut(target.name, entry.dtype, entry.shape, entry=entry))
            else:
                outs.append(TensorOut(target.name, entry.dtype, target.shape, make=make))
        return outs

    def origin(self, target: TensorSpec) -> TensorSpec:
        """Return the source tensor that becomes `target`. A tensor that only the first layer of a stage holds (T5's
        position table) stays with the stage when that layer is dropped.
        """
        template = self.template(target)
        old = None if target.layer is None else self.plan.layers[target.layer]
        if template in self.by_layer[old]:
            return self.by_layer[old][template]
        return replace(self.by_layer[self.plan.before.spans[target.stage].start][template], layer=old)

    def split_layer(self, layer: int) -> Arrays:
        """Return the attention of a new layer with heads of another size: exact if they grow, else by weights alone."""
        specs, old = canonical.of_attention(self.plan.result.by_layer[layer]), self.plan.layers[layer]
        before, after = (shape.stages[specs[0].stage] for shape in (self.plan.before, self.plan.after))
        attention = canonical.unpack(canonical.of_attention(self.by_layer[old].values()), before, self.weights.float32)
        split = split_heads.exact if after.head_dim >= before.head_dim else split_heads.weights_only
        return canonical.pack(split(attention, after, canonical.score_gain(self.source, before, after)), specs)

    def gather(self, target: TensorSpec, spec: TensorSpec, dtype: str) -> Array:
        """Return old entries at their new places; the others are drawn or zero."""
        picks = self.picks(spec)
        new = self.background(target, dtype, [np.flatnonzero(pick == FRESH) for pick in picks])
        places = [np.flatnonzero(pick != FRESH) for pick in picks]
        if target.role == "head_mix":  # old heads receive nothing from new ones
            new[places[0]] = 0
        move(new, places, self.weights.raw(spec.name), [p[at] for p, at in zip(picks, places, strict=True)])
        return new

    def background(self, target: TensorSpec, dtype: str, fresh_at: list[Array]) -> Array:
        """Return a tensor whose new places (by axis) hold initial values, and the others anything."""
        if target.new is not None:
            return from_float32(np.full(target.shape, target.new, np.float32), dtype)
        new = np.zeros(target.shape, RAW[dtype])
        grown = [axis for axis, at in enumerate(fresh_at) if len(at)]
        if not grown or target.role not in NEW_ROWS or len(target.shape) == 1:
            return new
        if len(grown) > 1:
            return from_float32(self.draw(target), dtype)
        at, rows = fresh_at[grown[0]], np.moveaxis(new, grown[0], 0)
        start = 0
        for values in draw_rows(len(at), rows.shape[1:], self.std(target), self.plan.seed, target.name):
            rows[as_slice(at[start : start + len(values)])] = from_float32(values, dtype)
            start += len(values)
        return new

    def make_edited(self, name: str, dtype: str) -> Array:
        """Return a tensor that sample data or a split has changed."""
        return from_float32(np.ascontiguousarray(self.edits[name], np.float32), dtype)

    def make_afresh(self, target: TensorSpec, dtype: str) -> Array:
        """Initialize the tensor: norms of q and k with one, other vectors with zero, matrices normal."""
        new = target.new if target.new is not None else 1.0 if target.role in QK_NORMS else None
        if new is None and len(target.shape) > 1:
            return from_float32(self.draw(target), dtype)
        return from_float32(np.full(target.shape, new or 0.0, np.float32), dtype)

    def draw(self, target: TensorSpec) -> Array:
        """Draw new entries with the library's standard deviation."""
        rows, *sizes = target.shape
        return next(draw_rows(rows, tuple(sizes), self.std(target), self.plan.seed, target.name, rows))

    def std(self, target: TensorSpec) -> float:
        """Return the standard deviation of fresh weights by the config of the result; 0.02 if it names none."""
        architecture = self.plan.architecture
        return architecture.std(architecture.flat(self.plan.target.config(self.plan.layers)), target.role) or 0.02


def draw_rows(
    rows: int, sizes: tuple[int, ...], std: float, seed: int, name: str, at_once: int | None = None
) -> Iterator[Array]:
    """Yield N(0, std) in float32, a pure function of (seed, tensor name): every tensor has its own stream, so the order
    of writing does not matter. `at_once` rows of `sizes` at a time (by default what fits in a cache).
    """
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = np.random.Generator(np.random.SFC64(np.random.SeedSequence(list(key[:16]))))
    at_once = at_once or max(1, PIECE // prod(sizes))
    for start in range(0, rows, at_once):
        values = generator.standard_normal((min(at_once, rows - start), *sizes), dtype=np.float32)
        values *= np.float32(std)
        yield values


# -- index maps ------------------------------------------------------------------------------------


class LayerMaps:
    """The old head and unit at every new place, for one attention or MLP of one source layer. Heads and units chosen by
    weight are chosen here, on first use.
    """

    def __init__(self, transfer: Transfer, spec: TensorSpec) -> None:
        self.transfer, self.layer, self.stage, self.group = transfer, spec.layer, spec.stage, spec.group
        self.before, self.after = transfer.plan.before.stages[spec.stage], transfer.plan.after.stages[spec.stage]
        # Name of the layer in surgery.json; `3.1` is the second attention of layer 3.
        layer = "outside" if self.layer is None else self.layer
        self.name = f"{layer}.{self.group}" if self.group else str(layer)

    def moves(self, axis: str) -> bool:
        """Return whether anything changes along this axis."""
        numbers = {"q": "heads", "heads": "heads", "kv": "kv_heads", "mlp": "mlp_dim"}
        changed = {unit for unit, name in numbers.items() if getattr(self.before, name) != getattr(self.after, name)}
        return bool(changed & {factor for part in axis.split("+") for factor in part.split("*")})

    def places(self, axis: str, size: int, role: str) -> Array:
        """Return the old index of every new entry along an axis of a tensor of this role; FRESH for new ones."""
        if not self.moves(axis):
            return np.arange(size)
        if (role, axis) == ("o", "q") and self.has_children:
            return map_children(self.before, self.after)[2]
        return map_entries(axis, self.before, self)

    @property
    def has_children(self) -> bool:
        """Whether old heads are split into children instead of adding new heads."""
        return self.transfer.plan.method.more == "split" and self.after.heads > self.before.heads

    @cached_property
    def head_maps(self) -> tuple[Array, Array]:
        """The old head of every new query head, and of every new key/value head."""
        before, after = self.before, self.after
        if self.has_children:
            return map_children(before, after)[:2]
        if after.heads >= before.heads:
            return map_added_heads(before, after)
        chosen = map_strongest_heads(before, after, self.strength)
        self.transfer.kept_heads[self.name] = tuple(chosen[0].tolist())
        return chosen

    def choose_heads(self, kept: Array) -> None:
        """Keep these heads, instead of those that the weights alone suggest."""
        groups = np.unique(kept // (self.before.heads // self.before.kv_heads))  # groups with any head left
        self.head_maps = (kept, groups)

    @property
    def heads(self) -> Array:
        """The old head of every new query head."""
        return self.head_maps[0]

    @property
    def kv_heads(self) -> Array:
        """The old head of every new key/value head."""
        return self.head_maps[1]

    @property
    def strength(self) -> Array:
        """One number per head: as measured, else by weight.

        If the layers of a stage must keep the same heads, it is the sum over the kept layers.
        """
        plan, known = self.transfer.plan, self.transfer.strengths
        if (measured := plan.strength.get((self.layer, self.group))) is not None:
            return measured
        in_step = self.transfer.source.architecture.blocks(self.stage).in_step(self.group)
        layers = [i for i in plan.layers if i in plan.before.spans[self.stage]] if in_step else [self.layer]
        if (key := (*layers, self.group)) not in known:
            outputs = (self.matrix("o", "q", layer, last=True) for layer in layers)  # (width, heads * head_dim)
            heads = (output.reshape(len(output), self.before.heads, -1) for output in outputs)
            known[key] = np.sum([np.linalg.norm(of_layer, axis=(0, 2)) for of_layer in heads], axis=0)
        return known[key]

    @cached_property
    def units(self) -> Array:
        """(new,) the old MLP unit of every new one, FRESH for added ones. If some go, the strongest stay: strength is
        the product of the norms of their input and output weights.
        """
        before, after = self.before.mlp_dim, self.after.mlp_dim
        if after >= before:
            return widen(before, after)
        roles = [role for role in ("up", "gate") if self.of_role(role, self.layer)]
        incoming = [self.matrix(role, "mlp", self.layer, last=False) for role in roles]
        halves = [part for matrix in incoming for part in np.split(matrix, len(matrix) // before)]
        score = np.linalg.norm(self.matrix("down", "mlp", self.layer, last=True), axis=0)
        for matrix in halves:  # (mlp, width)
            score = score * np.linalg.norm(matrix, axis=1)
        return np.sort(np.argsort(-score, kind="stable")[:after])

    def of_role(self, role: str, layer: int | None) -> list[TensorSpec]:
        """Return a layer's tensors of one role."""
        specs = self.transfer.by_layer[layer].values()
        return [spec for spec in specs if spec.role == role and spec.group == self.group]

    def matrix(self, role: str, axis: str, layer: int | None, *, last: bool) -> Array:
        """Return the weight matrix of a role in float32, oriented so that `axis` is its last or first dimension."""
        spec = next((s for s in self.of_role(role, layer) if prod(s.shape[2:]) == 1 < len(s.shape)), None)
        if spec is None:
            raise UnsupportedModel(
                f"Layer {self.name} has no plain matrix '{role}', so its weights do not say what is strong.",
                "Units and heads of it can be added, and layers dropped.",
            )
        values = self.transfer.weights.float32(spec.name).reshape(spec.shape[:2])  # includes 1x1 convolutions
        at = next(i for i, a in enumerate(spec.axes) if axis in a.split("+"))
        return values if (at == 1) == last else values.T


def map_children(before: Stage, after: Stage) -> tuple[Array, Array, Array]:
    """Return the parent of every new query head and key/value head, and the old column of every new output column,
    FRESH (zero) if it belongs to a sibling.
    """
    children, d = after.heads // before.heads, before.head_dim
    queries = np.repeat(np.arange(before.heads), children)
    values = queries.copy() if before.kv_heads == before.heads else np.arange(before.kv_heads)
    columns = np.arange(d)[None] + queries[:, None] * d
    owner = np.arange(d) * children // d  # slices of nearly the same size
    mine = owner[None] == np.tile(np.arange(children), before.heads)[:, None]
    return queries, values, np.where(mine, columns, FRESH).reshape(-1)


def map_strongest_heads(before: Stage, after: Stage, strength: Array) -> tuple[Array, Array]:
    """Return the strongest heads by `strength` (one number per head), in their old order: as many from every key/value
    group, or whole groups if their number changes (a head with keys of its own is a group).
    """
    per_group = strength.reshape(before.kv_heads, -1)
    if after.kv_heads != before.kv_heads:
        groups = np.sort(np.argsort(-per_group.sum(1), kind="stable")[: after.kv_heads])
        return (groups[:, None] * per_group.shape[1] + np.arange(per_group.shape[1])).reshape(-1), groups
    best = np.sort(np.argsort(-per_group, axis=1, kind="stable")[:, : after.heads // after.kv_heads], axis=1)
    return (best + np.arange(before.kv_heads)[:, None] * per_group.shape[1]).reshape(-1), np.arange(before.kv_heads)


def as_slice(places: Array) -> Array | slice:
    """Return places along an axis, as a slice if they are consecutive, which numpy copies much faster."""
    if len(places) and int(places[-1]) - int(places[0]) == len(places) - 1 and (np.diff(places) == 1).all():
        return slice(int(places[0]), int(places[-1]) + 1)
    return places


def move(new: Array, places: list[Array], old: Array, origins: list[Array]) -> None:
    """Assign `new[places] = old[origins]` along every axis; nearly always, at most one axis is not a slice."""
    to, of = [as_slice(p) for p in places], [as_slice(p) for p in origins]
    if sum(isinstance(x, Array) for x in to) <= 1 and sum(isinstance(x, Array) for x in of) <= 1:
        new[tuple(to)] = old[tuple(of)]
    else:
        new[np.ix_(*places)] = old[np.ix_(*origins)]
