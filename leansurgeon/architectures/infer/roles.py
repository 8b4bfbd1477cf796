"""Roles of tensors: the proof shows where units are, and names only distinguish q, k and v."""

from __future__ import annotations

import re
from collections.abc import Iterable

Q = re.compile(r"^(w?q|q_?\d?|.*query|q_?(b_)?proj|q_lin|q_up_proj|to_q|linear_q|w_q|wq_b|q_linear)$", re.I)
K = re.compile(r"^(w?k|.*key|k_?(b_)?proj|k_lin|to_k|linear_k|w_k|k_linear)$", re.I)
V = re.compile(r"^(w?v|.*value|v_?(b_)?proj|v_lin|to_v|linear_v|w_v|v_linear)$", re.I)
ATTENTION = re.compile(r"attn|attention|att\b|self|mixer", re.I)
NORM = re.compile(r"norm|ln_|layer_scale|lambda", re.I)


def module_of(template: str) -> str:
    """Return the module path of a tensor's name: without `weight` and `bias`."""
    path, _, leaf = template.rpartition(".")
    return path if leaf in ("weight", "bias", "beta", "gamma") else template


def leaf_of(template: str) -> str:
    parts = module_of(template).split(".")
    plain = [p for p in parts if p not in ("dense", "linear", "layer", "0", "1", "projection")]
    return (plain or parts)[-1]


def of_head_tensor(template: str, words: Iterable[str], sink: bool, dims: int) -> str:
    """Return the role of a tensor with an axis of heads."""
    if sink:
        return "o"
    joined, leaf = "+".join(words), leaf_of(template)
    if NORM.search(leaf) and dims == 1 and not template.endswith(".bias"):
        return "qk_norm"
    if joined == "heads" or (dims == 1 and joined.startswith("heads*1")):
        return "head_param"
    if joined in ("q", "kv"):
        for role, pattern in (("q", Q), ("k", K), ("v", V)):
            if pattern.match(leaf):
                return role
    return "qkv" if "+" in joined or joined == "heads*qkv" else "q" if joined == "q" else "head_param"


def of_mlp_tensor(template: str, sink: bool) -> str:
    if sink:
        return "down"
    return "gate" if "gate" in leaf_of(template) and "gate_up" not in template else "up"


def of_other(template: str, dims: int) -> str:
    """Return the role of a tensor within a block that has neither heads nor MLP units."""
    if dims <= 1 or NORM.search(leaf_of(template)):
        return "norm"
    return "other_attention" if ATTENTION.search(template) else "other_mlp"


def nearest(template: str, sinks: list[str]) -> int:
    """Return the index of the output projection that a tensor belongs to: the one that shares most of its path."""

    def first_difference(sink: str) -> int:
        pairs = zip(template.split("."), sink.split("."), strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), 99)

    return max(range(len(sinks)), key=lambda i: (first_difference(sinks[i]), -i), default=0)
