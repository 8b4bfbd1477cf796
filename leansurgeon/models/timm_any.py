"""Any transformer of timm whose blocks hold a plain attention, with a head_dim of its own: importing this module
registers the entry point `leansurgeon_any` with timm.

`timm.create_model("local-dir:FOLDER", pretrained=True)` then builds a folder whose config.json says `{"architecture":
"leansurgeon_any", "model_args": {"lean": {...}, "num_heads": 24, "lean_head_dim": 64, ...}, ...}`. The model is timm's
own, built with the heads that its width allows (`native`), and then every attention gets the heads that the arguments
name. Which modules and numbers make it up stands in `lean`, as it was found and proven for the class:

    {"base": "deit3_base_patch16_224", "native": {"num_heads": 12},
     "stages": [{"blocks": "blocks", "heads": "num_heads", "kv_heads": None, "head_dim": "lean_head_dim",
                 "numbers": {"attn.num_heads": "heads"}, "projections": {"attn.qkv": "q+kv+kv", "attn.proj": "o"}}]}

Heads of a list are named by their place in it (`num_heads.2`). Tensor names and forward pass are timm's.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.layers import apply_rot_embed_cat, trunc_normal_
from timm.models.eva import EvaAttention
from torch import Tensor, nn

from leansurgeon.models.decoupled_any import Numbers, blocks_of, has
from leansurgeon.models.timm_parts import IMAGENET, entry_point

NAME = "leansurgeon_any"
HEADS = ("num_heads", "heads")  # what timm's constructors call them


def create(name: str, args: Mapping[str, Any]) -> nn.Module:
    """A timm model by its entry point, one of ours too."""
    if name.startswith("leansurgeon_") and not timm.is_model(name):
        importlib.import_module(f"leansurgeon.models.{name.replace('leansurgeon_', 'timm_')}")
    return timm.create_model(NAME if "lean" in args else name, **args)


class LeanTimm:
    """Builds a model of timm's and widens its attentions."""

    def __new__(cls, *, lean: Mapping[str, Any], **kwargs: Any) -> nn.Module:
        check(lean)
        sizes = {stage["head_dim"]: kwargs.pop(stage["head_dim"]) for stage in lean["stages"]}
        asked = {key: at(kwargs, key) for key in lean["native"]}
        for key, heads in lean["native"].items():
            put(kwargs, key, heads)
        model = timm.create_model(lean["base"], **kwargs)
        for stage in lean["stages"]:
            now = Numbers(SimpleNamespace(lean_numbers=asked, **sizes), stage)
            for block in blocks_of(model, stage["blocks"]):
                for module in block.modules():
                    if type(module) is EvaAttention:
                        module.__class__ = LeanEvaAttention
                widen(block, stage, now)
        return model


def check(lean: Mapping[str, Any]) -> None:
    """Raises `ValueError` where a config would have timm build something else than one of its models with other heads:
    its arguments can name files that are unpickled.
    """
    keys = [*lean["native"], *(stage["heads"] for stage in lean["stages"])]
    wrong = [key for key in keys if key.split(".")[0] not in HEADS]
    wrong += [stage["head_dim"] for stage in lean["stages"] if not stage["head_dim"].startswith("lean_head_dim")]
    if wrong or not timm.is_model(lean["base"]) or not all(isinstance(n, int) for n in lean["native"].values()):
        raise ValueError(f"{NAME} takes a model of timm and numbers of heads, not {wrong[:1] or lean['base']}.")


class LeanEvaAttention(EvaAttention):
    """EVA's attention with an inner width of its own (timm 1.0.31 shapes what comes out like what went in).

    `(batch, tokens, dim)` -> the same.
    """

    def forward(self, x: Tensor, rope: Tensor | None = None, attn_mask: Any = None, is_causal: bool = False) -> Tensor:
        q, k, v = (self.by_head(y) for y in self.queries_keys_values(x))
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = self.rotated(q, rope).type_as(v), self.rotated(k, rope).type_as(v)
        dropout = self.attn_drop.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout, is_causal=is_causal)
        y = self.norm(y.transpose(1, 2).flatten(2))
        if getattr(self, "gate", None) is not None:
            y = y * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(y))

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.qkv is None:
            return self.q_proj(x), self.k_proj(x), self.v_proj(x)
        qkv = self.qkv(x)
        if self.q_bias is not None:
            qkv = qkv + torch.cat((self.q_bias, self.k_bias, self.v_bias))
        return qkv.chunk(3, dim=-1)

    def by_head(self, y: Tensor) -> Tensor:
        return y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def rotated(self, x: Tensor, rope: Tensor) -> Tensor:
        first, half = self.num_prefix_tokens, getattr(self, "rotate_half", False)
        return torch.cat((x[:, :, :first], apply_rot_embed_cat(x[:, :, first:], rope, half=half)), dim=2)


def at(args: Mapping[str, Any], key: str) -> Any:
    """An argument, or an entry of it."""
    name, *places = key.split(".")
    found = args[name]
    for place in places:
        found = found[int(place)]
    return found


def put(args: dict[str, Any], key: str, value: Any) -> None:
    """Set an argument, or an entry of it; lists stay as they were for others."""
    name, *places = key.split(".")
    args[name] = changed(args[name], [int(place) for place in places], value) if places else value


def changed(found: Any, places: list[int], value: Any) -> Any:
    """A copy of lists in lists with another entry."""
    if not places:
        return value
    return [changed(v, places[1:], value) if i == places[0] else v for i, v in enumerate(found)]


def widen(block: nn.Module, stage: Mapping[str, Any], now: Numbers) -> None:
    """Give the attentions of a block these heads."""
    for path, kind in stage["numbers"].items():
        owner, _, name = path.rpartition(".")
        if owner == "" or has(block, owner):
            setattr(block.get_submodule(owner), name, getattr(now, kind))
    for path, word in stage["projections"].items():
        if not has(block, path):
            continue
        owner, _, name = path.rpartition(".")
        old = block.get_submodule(path)
        inputs, outputs = (now.inner, old.out_features) if word == "o" else (old.in_features, now.size(word))
        new = nn.Linear(inputs, outputs, old.bias is not None, device=old.weight.device, dtype=old.weight.dtype)
        if not new.weight.is_meta:
            trunc_normal_(new.weight, std=0.02)
            if new.bias is not None:
                nn.init.zeros_(new.bias)
        setattr(block.get_submodule(owner), name, new)


leansurgeon_any = entry_point(LeanTimm, NAME, **IMAGENET)
