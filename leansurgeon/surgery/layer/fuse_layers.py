"""Fuse neighbouring layers: one layer with both sets of heads and both MLPs. Pure functions on canonical layers; numpy.

Two pre-norm layers one after the other, x + A1(x), + M1, + A2, + M2, become their parallel form

    h = x + A1(n x) + A2(n x)          y = h + M1(n h) + M2(n h)

which is one wider layer, exactly. What is lost is only that the second layer saw what the first had added (Kim et al.,
arXiv 2502.02790: layers run in parallel). One layer has one norm before its attention and one before its MLP, so
gains that differ are folded into the matrices behind them: W n(x) g + W beta = (W g / g') n(x) g' + W beta, with g' of
the size of both gains, so that no column is blown up.

A fused layer has twice the heads, key/value heads and MLP units. `take` keeps some of them (chosen by calibrated
trimming), `pad` adds silent ones, so that fused and other layers of a stage come to one shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from leansurgeon.architectures.base import TensorSpec
from leansurgeon.checkpoints.reshaped import within_block
from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import UnsupportedModel, UsageError
from leansurgeon.shape import Stage
from leansurgeon.surgery.layer import canonical
from leansurgeon.surgery.layer.canonical import MLP, Attention, Layer

Array = np.ndarray


@dataclass(frozen=True)
class Norms:
    """The names of a block's two norms in `Layer.rest`, and what is added to their weights to give the gain."""

    attention: str
    mlp: str
    offset: float = 0.0


# -- whether ---------------------------------------------------------------------------------------


def supported(source: Source) -> str | None:
    """Why two layers of this model cannot become one, in one sentence; None where they can."""
    arch = source.architecture
    if reason := canonical.supported(source):
        return reason
    if arch.norm != "pre":
        return f"{arch.name} has its norms behind attention and MLP; layers that run in parallel need them before."
    if arch.period > 1 or not alike(source):
        return f"Layers of {arch.name} differ in more than their weights (windows, or kinds of attention)."
    for number, stage in enumerate(source.shape.stages):
        specs = [s for s in source.specs if s.layer is not None and s.stage == number]
        names = stems(source, number)
        known = {s.name for s in specs if s.role in (*canonical.ATTENTION_ROLES, "o", "up", "gate", "down", "norm")}
        strange = next((s for s in specs if s.name not in known), None)
        if strange is not None:
            return f"'{strange.name}' ({strange.role}) of one layer cannot be joined with that of another."
        if len(names) != 2:
            return f"A layer of {arch.name} has {len(names)} norms or scales, and two can be folded."
        if lacking := without_place(specs, rotary=canonical.rotary(source)):
            return f"Norms of {arch.name} have shifts, and its {lacking} no biases that could take them."
        if stage.depth > 1 and len({len([s for s in specs if s.layer == i]) for i in {s.layer for s in specs}}) > 1:
            return f"The first layer of {arch.name} has other tensors than the rest."
    return None


def alike(source: Source) -> bool:
    """Whether the config says the same of every layer (windows, rotary positions)."""
    arch = source.architecture
    config = arch.flat(source.config)
    for key in arch.per_layer:
        rule = arch.defaults.get(key)
        values = config.get(key) or (rule(config) if callable(rule) else [])
        if any(value != values[0] for value in values):
            return False
    return True


def without_place(specs: Sequence[TensorSpec], *, rotary: bool) -> str | None:
    """What has no bias that could take a norm's shift. Keys need none where positions do not rotate them: a shift of
    all keys adds the same to all scores of a query.
    """
    if not any(s.role == "norm" and s.name.endswith(".bias") for s in specs):
        return None
    biases = {letter for s in specs if s.role in canonical.ATTENTION_ROLES and len(s.shape) == 1 for letter in s.role}
    lacking = {"q", "k", "v"} - biases - (set() if rotary else {"k"})
    if lacking:
        return canonical.names(lacking)
    return None if any(s.role == "up" and len(s.shape) == 1 for s in specs) else "MLP"


def stems(source: Source, stage: int = 0) -> list[str]:
    """Norms of a block without `.weight` and `.bias`, in the order of the declaration: attention first."""
    present = {within_block(s, source.architecture) for s in source.specs if s.layer is not None}
    declared = [t.name for t in source.architecture.blocks(stage).block if t.role == "norm"]
    return list(dict.fromkeys(name.rsplit(".", 1)[0] for name in declared if name in present))


def norms_of(source: Source, stage: int = 0) -> Norms:
    """Raises `UnsupportedModel` where `supported` has a reason."""
    if reason := supported(source):
        raise UnsupportedModel(f"Layers cannot be fused: {reason}", "Use another --method.")
    return Norms(*stems(source, stage), offset=source.architecture.norm_offset)


# -- norms -----------------------------------------------------------------------------------------


def gain(layer: Layer, norm: str, norms: Norms) -> Array:
    """What a norm multiplies by, `(width,)`."""
    return layer.rest[f"{norm}.weight"] + np.float32(norms.offset)


def folded(layer: Layer, norms: Norms, gains: tuple[Array, Array]) -> Layer:
    """The same layer with other gains before attention and MLP and without shifts; both move into the matrices."""
    into_attention, into_mlp = (
        (gain(layer, name, norms) / new, layer.rest.get(f"{name}.bias"))
        for name, new in zip((norms.attention, norms.mlp), gains, strict=True)
    )
    attention, mlp = layer.attention, layer.mlp
    new_attention = {}
    for x in "qkv":
        weight, bias = getattr(attention, x), getattr(attention, f"{x}_bias")
        new_attention |= {x: weight * into_attention[0], f"{x}_bias": with_shift(weight, bias, into_attention[1])}
    if attention.k_bias is None:  # see `without_place`
        new_attention["k_bias"] = None
    new_mlp = {}
    for x in ("up", "gate"):
        weight, bias = getattr(mlp, x), getattr(mlp, f"{x}_bias")
        if weight is not None:
            new_mlp |= {x: weight * into_mlp[0], f"{x}_bias": with_shift(weight, bias, into_mlp[1])}
    rest = dict(layer.rest)
    for name, new in zip((norms.attention, norms.mlp), gains, strict=True):
        rest[f"{name}.weight"] = new - np.float32(norms.offset)
        if f"{name}.bias" in rest:
            rest[f"{name}.bias"] = np.zeros_like(rest[f"{name}.bias"])
    return Layer(replace(attention, **new_attention), replace(mlp, **new_mlp), rest)


def with_shift(weight: Array, bias: Array | None, beta: Array | None) -> Array | None:
    """The bias that stands for the norm's shift, too."""
    if beta is None:
        return bias
    moved = weight @ beta
    return moved if bias is None else bias + moved


def common(a: Array, b: Array) -> Array:
    """A gain of the size of both: their root mean square, 1 where both are zero."""
    size = np.sqrt((a * a + b * b) / 2)
    return np.where(size > 0, size, 1).astype(np.float32)


# -- fuse ------------------------------------------------------------------------------------------


def fuse(first: Layer, second: Layer, norms: Norms) -> Layer:
    """The parallel form of two layers as one: heads of `first`, then those of `second`; so the MLP units."""
    names = (norms.attention, norms.mlp)
    same = all(np.array_equal(first.rest[key], second.rest[key]) for key in first.rest)
    if not same:
        gains = tuple(common(*(gain(layer, name, norms) for layer in (first, second))) for name in names)
        first, second = (folded(layer, norms, gains) for layer in (first, second))
    return Layer(joined(first.attention, second.attention), joined(first.mlp, second.mlp), dict(first.rest))


def joined(a: Attention | MLP, b: Attention | MLP) -> Attention | MLP:
    """Heads or units side by side; what is added to the residual stream, summed."""
    tensors = {}
    for field in fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if field.name in ("o_bias", "down_bias"):
            tensors[field.name] = x if y is None else y if x is None else x + y
        elif x is None and y is None:
            tensors[field.name] = None
        else:
            x, y = (np.zeros_like(z) if v is None else v for v, z in ((x, y), (y, x)))
            tensors[field.name] = np.concatenate([x, y], axis=1 if field.name in ("o", "down") else 0)
    return type(a)(**tensors)


# -- to one shape ----------------------------------------------------------------------------------


def take(layer: Layer, kv_heads: Sequence[int], units: Sequence[int]) -> Layer:
    """Only these key/value heads with all their query heads (without grouping: only these heads) and MLP units."""
    a, m, kv, units = layer.attention, layer.mlp, np.asarray(kv_heads), np.asarray(units)
    each = a.heads // a.kv_heads
    q = (kv[:, None] * each + np.arange(each)).reshape(-1)
    attention = Attention(
        a.q[q], a.k[kv], a.v[kv], a.o[:, q], some(a.q_bias, q), some(a.k_bias, kv), some(a.v_bias, kv), a.o_bias
    )
    mlp = MLP(m.up[units], m.down[:, units], some(m.gate, units), some(m.up_bias, units), some(m.gate_bias, units),
              m.down_bias)  # fmt: skip
    return Layer(attention, mlp, layer.rest)


def some(values: Array | None, index: Array) -> Array | None:
    """The chosen entries of what may be absent."""
    return None if values is None else values[index]


def pad(layer: Layer, after: Stage, std: float = 0.02, seed: int = 0) -> Layer:
    """Silent heads and units until the layer has the shape of `after`: zero columns in the output, everything else
    drawn (with values of zero, too, nothing of a new head would ever learn). Raises `UsageError` where the layer has
    more than `after`, or its key/value heads serve other numbers of heads.
    """
    a, m = layer.attention, layer.mlp
    each, wanted = a.heads // a.kv_heads, after.heads // after.kv_heads
    if a.kv_heads > after.kv_heads or each > wanted or len(m.up) > after.mlp_dim or a.head_dim != after.head_dim:
        raise UsageError(
            f"A layer of {a.heads} heads on {a.kv_heads} key/value heads with {len(m.up)} MLP units is no part of one "
            f"of {after.heads} on {after.kv_heads} with {after.mlp_dim}."
        )
    rng = np.random.default_rng(seed)

    def drawn(*shape: int) -> Array:
        """Normal values with the model's own standard deviation."""
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(std)

    def grown(x: Array | None, count: int) -> Array | None:
        """More heads or units along the first axis; new biases are zero."""
        if x is None or count == len(x):
            return x
        vector = x.ndim < 2 or (x.shape[1:] != (a.head_dim, a.width) and x.shape[1:] != (a.width,))
        more = (count - len(x), *x.shape[1:])
        return np.concatenate([x, np.zeros(more, np.float32) if vector else drawn(*more)])

    def queries(x: Array | None, *, silent: bool = False) -> Array | None:
        """More query heads in every group, then more groups."""
        if x is None:
            return None
        groups = x.reshape(a.kv_heads, each, *x.shape[1:])
        new = np.zeros((after.kv_heads, wanted, *x.shape[1:]), np.float32)
        if not silent and (after.kv_heads, wanted) != (a.kv_heads, each):
            new = drawn(*new.shape)
        new[: a.kv_heads, :each] = groups
        return new.reshape(after.heads, *x.shape[1:])

    attention = replace(
        a,
        q=queries(a.q),
        q_bias=queries(a.q_bias, silent=True),
        o=np.ascontiguousarray(np.moveaxis(queries(np.moveaxis(a.o, 1, 0), silent=True), 0, 1)),
        **{x: grown(getattr(a, x), after.kv_heads) for x in ("k", "v", "k_bias", "v_bias")},
    )
    down = np.zeros((m.down.shape[0], after.mlp_dim), np.float32)
    down[:, : m.down.shape[1]] = m.down
    mlp = replace(
        m, down=down, **{x: grown(getattr(m, x), after.mlp_dim) for x in ("up", "gate", "up_bias", "gate_bias")}
    )
    return Layer(attention, mlp, layer.rest)


# -- which -----------------------------------------------------------------------------------------


def choose_pairs(cost: Sequence[float], stage: range, count: int) -> tuple[int, ...]:
    """The first layers of `count` disjoint neighbouring pairs of a stage with the smallest sum of costs; `cost[i]` is
    that of the pair (i, i + 1), counted through all stages. Raises `UsageError` where there are not so many pairs.
    """
    if 2 * count > len(stage):
        raise UsageError(
            f"{len(stage)} layers make {len(stage) // 2} pairs, and {count} are to be fused; fusing halves at most.",
            f"Keep at least {len(stage) - len(stage) // 2} layers, or use another --method.",
        )
    none = (float("inf"), ())
    best = [[(0.0, ())] + [none] * count]  # best[n][c]: c pairs among the first n layers
    for n in range(1, len(stage) + 1):
        row = list(best[n - 1])
        for c in range(1, count + 1) if n > 1 else ():
            total, pairs = best[n - 2][c - 1]
            here = stage[n - 2]
            row[c] = min(row[c], (total + cost[here], (*pairs, here)))
        best.append(row)
    return best[-1][count][1]
