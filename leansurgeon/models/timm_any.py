"""Any timm transformer whose blocks hold plain attention, with a free head_dim.

Importing this module registers the entry point `leansurgeon_any` with timm.
`timm.create_model("local-dir:FOLDER", pretrained=True)` then builds a folder whose config.json says `{"architecture":
"leansurgeon_any", "model_args": {"lean": {...}, "num_heads": 24, "lean_head_dim": 64, ...}, ...}`. The model is timm's
own, built with the heads that its width allows (`native`); then every attention gets the heads that the arguments name.
`lean` lists the modules and numbers of the attentions, as found and proven for the class:

    {"base": "deit3_base_patch16_224", "native": {"num_heads": 12},
     "stages": [{"blocks": "blocks", "heads": "num_heads", "kv_heads": None, "head_dim": "lean_head_dim",
                 "numbers": {"attn.num_heads": "heads"}, "projections": {"attn.qkv": "q+kv+kv", "attn.proj": "o"}}]}

Entries of a list of heads are named by index (`num_heads.2`). Tensor names and forward pass are timm's.
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
HEADS = ("num_heads", "heads")  # names of the argument in timm's constructors


def create(name: str, args: Mapping[str, Any]) -> nn.Module:
    """Create a timm model by its entry point, including ours."""
    if name.startswith("leansurgeon_") and not timm.is_model(name):
        importlib.import_module(f"leansurgeon.models.{name.replace('leansurgeon_', 'timm_')}")
    return timm.create_model(NAME if "lean" in args else name, **args)


class LeanTimm:
    """Builds a model of timm and widens its attentions."""

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
    """Raise `ValueError` if a config would build anything but one of timm's models with other heads.

    timm's arguments can name files that are unpickled.
    """
    keys = [*lean["native"], *(stage["heads"] for stage in lean["stages"])]
    wrong = [key for key in keys if key.split(".")[0] not in HEADS]
    wrong += [stage["head_dim"] for stage in lean["stages"] if not stage["head_dim"].startswith("lean_head_dim")]
    if wrong or not timm.is_model(lean["base"]) or not all(isinstance(n, int) for n in lean["native"].values()):
        raise ValueError(f"{NAME} takes a model of timm and numbers of heads, not {wrong[:1] or lean['base']}.")


def as_lists(value: Any) -> Any:
    """Copy nested lists."""
    return [as_lists(v) for v in value] if isinstance(value, list | tuple) else value


def exchange(args: Any, key: str, value: int) -> Any:
    """Set an argument, or an entry of it (`num_heads.2`), and return its old value."""
    *path, last = (int(part) if part.isdigit() else part for part in key.split("."))
    for place in path:
        args = args[place]
    old, args[last] = args[last], value
    return old


def replace(block: nn.Module, path: str, word: str, now: Numbers) -> None:
    """Replace the projection at `path` by one of another size, initialised as timm does."""
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
