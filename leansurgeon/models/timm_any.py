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
from typing import Any

import timm
from timm.layers import trunc_normal_
from timm.models.eva import EvaAttention
from torch import nn

from leansurgeon.models.decoupled_any import Numbers, blocks_of, widen_block
from leansurgeon.models.timm_eva import LeanEvaAttention
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
        kwargs |= {key: as_lists(kwargs[key]) for key in HEADS if key in kwargs}
        asked = {key: exchange(kwargs, key, heads) for key, heads in lean["native"].items()}
        model = timm.create_model(lean["base"], **kwargs)
        for stage in lean["stages"]:
            now = Numbers(stage, asked, sizes[stage["head_dim"]])
            for block in blocks_of(model, stage["blocks"]):
                for module in block.modules():
                    if type(module) is EvaAttention:
                        module.__class__ = LeanEvaAttention
                widen_block(block, stage, now, replace)
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


def as_lists(value: Any) -> Any:
    """A copy of lists in lists."""
    return [as_lists(v) for v in value] if isinstance(value, list | tuple) else value


def exchange(args: Any, key: str, value: int) -> Any:
    """Put a value in the place of an argument, or of an entry of it (`num_heads.2`), and give what stood there."""
    *path, last = (int(part) if part.isdigit() else part for part in key.split("."))
    for place in path:
        args = args[place]
    old, args[last] = args[last], value
    return old


def replace(block: nn.Module, path: str, word: str, now: Numbers) -> None:
    """A projection of another size in place of the one at `path`, its weights drawn as timm draws them."""
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
