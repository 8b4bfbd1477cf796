"""Balance attention heads: change the basis of each head's values, and of its queries and keys, so that the matrices
are as well conditioned as possible. The model's function does not change. Uses numpy only.

`measure.kappa.basis` holds the mathematics of one head. A head's values reach the output only through the product W_o
W_v; queries and keys enter only through q . k = x^T W_q^T W_k y, unless rotary positions or norms come between
projection and product. With grouped-query attention, a key/value head has one basis, and all query heads of its group
use it. Biases are transformed as well.

Two kinds of heads are left alone: those whose product is rank-deficient (a newly added head with zero output; its basis
is arbitrary, and balancing would erase its random initialization), and those that are balanced already.

The kappa of one head's matrix says how evenly a gradient step spreads over its directions. It is *not* a property of
the function (which is what makes balancing possible), so record the numbers before and after together.

Shape letter: D head_dim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from leansurgeon.architectures.tensors import QK_NORMS
from leansurgeon.checkpoints.reshaped import Reshaped
from leansurgeon.checkpoints.source import Source
from leansurgeon.checkpoints.weights import Arrays, TensorOut, from_float32
from leansurgeon.errors import Diverged
from leansurgeon.measure.kappa.basis import Pair, balance
from leansurgeon.surgery.canonical import Attention, LayerTensors, of_attention, pack, rotary, unpack

Array = np.ndarray


# -- one attention ---------------------------------------------------------------------------------


def balance_attention(attention: Attention, *, scores: bool) -> tuple[Attention, dict[str, Any]]:
    """Return the same attention in balanced bases, and the condition numbers of its heads. `scores` says whether
    queries and keys may change basis, too.
    """
    new = {
        name: None if (old := getattr(attention, name)) is None else old.copy()
        for name in ("q", "k", "v", "o", "q_bias", "k_bias", "v_bias")
    }
    record = {}
    for group in range(attention.kv_heads):
        each = attention.heads // attention.kv_heads
        heads = slice(group * each, (group + 1) * each)
        outputs = new["o"][:, heads]  # (width, each, D)
        pair = balance(outputs.reshape(-1, attention.head_dim), new["v"][group])
        note(record, "o", "v", pair)
        if pair.basis is not None:
            new["o"][:, heads] = pair.left.reshape(outputs.shape)
            new["v"][group] = pair.right
            if new["v_bias"] is not None:
                new["v_bias"][group] = pair.basis @ new["v_bias"][group]
        if not scores:
            continue
        queries = new["q"][heads].transpose(0, 2, 1)  # (each, width, D)
        pair = balance(queries.reshape(-1, attention.head_dim), new["k"][group])
        note(record, "q", "k", pair)
        if pair.basis is not None:
            new["q"][heads] = pair.left.reshape(queries.shape).transpose(0, 2, 1)
            new["k"][group] = pair.right
            if new["k_bias"] is not None:
                new["k_bias"][group] = pair.basis @ new["k_bias"][group]
            if new["q_bias"] is not None:  # q is transformed by R^-T
                new["q_bias"][heads] = np.linalg.solve(pair.basis.T, new["q_bias"][heads].T.astype(np.float64)).T
    figures = {}
    for key, rows in record.items():  # geometric mean and worst over the balanced heads; `left` are unchanged
        changed = [(before, after) for before, after, moved in rows if moved]
        figures[key] = {"heads": len(rows), "left": len(rows) - len(changed)}
        for i, name in enumerate(("before", "after") if changed else ()):
            values = np.array([pair[i] for pair in changed])
            mean = round(float(np.exp(np.log(values).mean())), 3)
            figures[key][name] = {"mean": mean, "worst": round(values.max().item(), 3)}
    return replace(attention, **new), figures


def note(record: dict[str, list], left: str, right: str, pair: Pair) -> None:
    """Append a pair's condition numbers before and after to the rows of its two matrices."""
    for name, before, after in zip((left, right), pair.before, pair.after, strict=True):
        record.setdefault(name, []).append((before, after, pair.basis is not None))


# -- a result --------------------------------------------------------------------------------------


def why_not_scores(source: Source) -> str | None:
    """Return what stands between queries, keys and their product; None if nothing does, so their basis may change."""
    if rotary(source):
        return "rotary positions"
    blocks = [s for s in source.specs if s.layer is not None]
    if any(s.role in QK_NORMS for s in blocks):
        return "query and key norms"
    if any(s.name.endswith("logit_scale") for s in blocks):
        return "scores are cosines"
    if "qk" not in source.architecture.bases:
        return "something stands between them and their product"
    return None


def balance_tensors(target: Reshaped, outs: list[TensorOut], record: dict[str, Any]) -> list[TensorOut]:
    """Return the tensors of a result with balanced heads. Balancing works on the final tensors `outs`, so it comes
    last. `record` is filled while tensors are made; making one raises `Diverged` if it holds NaN or infinity.
    """
    by_name, scores = {out.name: out for out in outs}, why_not_scores(target.source) is None

    def finite(name: str) -> Array:
        """Return a tensor in float32. Raises `Diverged` if it is not finite."""
        values = by_name[name].float32()
        if not np.isfinite(values).all():
            raise Diverged(f"'{name}' holds NaN or infinity, so it cannot be balanced.")
        return values

    def balance_layer(layer: int) -> Arrays:
        """Return the balanced tensors of a layer by name, in float32."""
        specs = of_attention(target.by_layer[layer])
        attention = unpack(specs, target.shape.stages[specs[0].stage], finite)
        attention, record[str(layer)] = balance_attention(attention, scores=scores)
        return pack(attention, specs)

    new = LayerTensors(of_attention(target.specs), balance_layer)
    return [
        replace(out, entry=None, make=lambda out=out: from_float32(new[out.name], out.dtype))
        if out.name in new
        else out
        for out in outs
    ]
