"""Test whether heads can be split into heads of half their size.

This needs an attention of the form `softmax(q k) v` that is linear from its values to its output, with nothing between
a projection and the product (rotations, norms, per-head tables), and a library that accepts more and smaller heads with
the matching scale of the scores.

Both are tried on random weights. A change of basis within each head for queries and keys, and one for values and
output, must change nothing. And heads whose second half is zero must equal twice as many heads of half the size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from leansurgeon.architectures.infer import roles
from leansurgeon.architectures.infer.cuts import ALIVE, Trial
from leansurgeon.architectures.infer.finding import Stage
from leansurgeon.architectures.infer.library import Unbuildable, difference
from leansurgeon.architectures.tensors import scale_by_key
from leansurgeon.shape import Stage as Numbers

EQUAL = 1e-4  # relative to the outputs' spread: allowed rounding error of two bases
BASES = "qkvo"
OTHERWISE = "something stands between its queries and keys and their product (rotations, norms, tables), or behind it"
Pieces = dict[str, list[tuple[int, str]]]  # by template: axes with their letters


def trouble(trial: Trial, stage: Stage, now: Numbers) -> str:
    """Return why heads of a stage cannot be split; empty if it was proven that they can."""
    if now.kv_heads != now.heads:
        return "its query heads share key/value heads"
    if now.head_dim % 2:
        return "its heads have an odd number of entries"
    pieces = letters(stage, trial)
    if pieces is None:
        return "its queries, keys and values cannot be told apart"
    if free_bases(trial, stage, now) != BASES:
        return OTHERWISE
    # By the library's rules, heads whose second half is zero equal twice as many heads of half the size.
    half = torch.eye(now.head_dim).expand(now.heads, -1, -1).clone()
    half[:, now.head_dim // 2 :] = 0
    gain = 1.0 if scale_by_key(trial.config) is not None else 2**-0.5  # 1 / sqrt(head_dim) grows as head_dim shrinks
    heads = {key: 2 * now.heads for key in (stage.heads_key, stage.kv_key) if key}
    try:
        whole = trial.run(trial.config, apply_to_heads(trial, pieces, now, dict.fromkeys("qkv", half)))
        state = apply_to_heads(trial, pieces, now, {"q": gain * half, "k": half, "v": half})
        apart = trial.run(trial.config | heads, state)
    except Unbuildable as error:
        return f"its library does not take heads of half the size ({error})"
    return "" if difference(whole, apart) <= EQUAL else "its scores have a scale that does not follow head_dim"


def letters(stage: Stage, trial: Trial) -> Pieces | None:
    """Return which axes hold queries, keys, values or the output's input; `qkv` for the three stacked."""
    by_template = {}
    dims = {p[1]: t.dim() for name, t in trial.state.items() if (p := trial.locate(name)) is not None}
    for template, axes in stage.heads.axes.items():
        for axis, word in axes:
            role = roles.of_head_tensor(template, [word], template in stage.heads.sinks, dims[template])
            if word not in ("q", "kv", "q+kv+kv") or role not in ("q", "k", "v", "o", "qkv"):
                return None
            by_template.setdefault(template, []).append((axis, role))
    known = {letter for places in by_template.values() for _, role in places for letter in role}
    return by_template if known == set("qkvo") else None


def apply_to_heads(trial: Trial, pieces: Pieces, now: Numbers, maps: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the file with `maps` (heads, head_dim, head_dim), one per letter, applied to the entries of every head."""
    tensors = dict(trial.state)
    for name, tensor in trial.state.items():
        placed = trial.locate(name)
        for axis, role in pieces.get(placed[1], ()) if placed else ():
            front = tensor.movedim(axis, 0)
            parts = front.split([now.head_dim * (now.kv_heads if x in "kv" else now.heads) for x in role])
            made = []
            for letter, part in zip(role, parts, strict=True):
                basis = maps.get(letter)
                of_heads = None if basis is None else part.reshape(*basis.shape[:2], -1)
                made.append(part if basis is None else (basis @ of_heads).reshape(part.shape))
            tensors[name] = tensor = torch.cat(made).movedim(0, axis).contiguous()
    return tensors


def free_bases(trial: Trial, stage: Stage, now: Numbers) -> str:
    """Return the pairs of "qkvo" that may change basis in every (key/value) head without changing the outputs."""
    pieces = letters(stage, trial) if stage.heads else None
    if pieces is None or now.heads % now.kv_heads:
        return ""
    generator, maps = torch.Generator().manual_seed(5), {}
    for one, other in ("kq", "vo"):
        turn = torch.linalg.qr(torch.randn(now.kv_heads, now.head_dim, now.head_dim, generator=generator))[0]
        basis = turn * torch.empty(now.kv_heads, 1, now.head_dim).uniform_(0.7, 1.4, generator=generator)
        maps |= {one: basis, other: torch.linalg.inv(basis).mT.repeat_interleave(now.heads // now.kv_heads, 0)}

    def differs(chosen: str) -> float:
        state = apply_to_heads(trial, pieces, now, {letter: maps[letter] for letter in chosen})
        return difference(trial.output, trial.run(trial.config, state))

    try:
        return "".join(pair for pair in ("qk", "vo") if differs(pair) <= EQUAL and differs(pair[0]) >= ALIVE)
    except (Unbuildable, RuntimeError):  # raised as well if some layers have heads of another size
        return ""
