"""timm's CaiT: talking-heads attention, and two class-attention blocks at the end, which surgery leaves as they are
unless --class-attention asks them to follow.

Talking heads mix with each other before and after the softmax. A new head hears the old ones, and the old ones hear
nothing of it, so adding heads is exact. timm's constructor gives the heads to the class attention, too, so a result
with other heads is of `leansurgeon_cait`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from leansurgeon.architectures.base import Architecture, Config, Keys, Tensor, derive, exact_ratio
from leansurgeon.architectures.timm_models import (
    DEFAULTS,
    PATCH_SIZES,
    TimmModels,
    class_attention,
    class_inner,
    linear,
    mlp,
    norm,
    plain_numbers,
    tokens,
)

if TYPE_CHECKING:
    from torch import nn


def reads(model: nn.Module) -> Config:
    """The constructor's arguments of a built Cait."""
    width = model.embed_dim
    return {
        **plain_numbers(model),
        "qkv_bias": model.blocks[0].attn.qkv.bias is not None,
        "init_values": 1e-6 if width >= 768 else 1e-5,  # the published rule; it matters for new models only
        "depth_token_only": len(model.blocks_token_only),
        "mlp_ratio_token_only": exact_ratio(model.blocks_token_only[0].mlp.fc1.out_features, width),
    }


def adopt(config: Config) -> Config:
    """The class attention keeps its heads."""
    config["model_args"].setdefault("cls_num_heads", config["model_args"]["num_heads"])
    return config


def class_block(name: str, number: int) -> tuple[Tensor, ...]:
    """A block of class attention."""
    return (
        Tensor(f"{name}gamma_1", "norm", "width"),
        Tensor(f"{name}gamma_2", "norm", "width"),
        *norm(f"{name}norm1"),
        *class_attention(f"{name}attn", number),
        *norm(f"{name}norm2"),
        *mlp(f"{name}mlp", "cls_mlp", role="other_mlp"),
    )


TIMM_CAIT = Architecture(
    name="timm_cait",
    library="timm",
    model_types=("cait_*",),
    keys=Keys("depth", "num_heads", "embed_dim", mlp_ratio="mlp_ratio"),
    layer="blocks.{i}.",
    block=(
        Tensor("gamma_1", "norm", "width"),
        Tensor("gamma_2", "norm", "width"),
        *norm("norm1"),
        *linear("attn.qkv", "qkv", "q+kv+kv", "width", bias="qkv_bias"),
        *linear("attn.proj", "o", "width", "q"),
        *linear("attn.proj_l", "head_mix", "heads", "heads"),
        *linear("attn.proj_w", "head_mix", "heads", "heads"),
        *norm("norm2"),
        *mlp("mlp"),
    ),
    outer=(
        Tensor("cls_token", "embedding", "1 1 width"),
        Tensor("pos_embed", "embedding", "1 patches width"),
        *linear("patch_embed.proj", "embedding", "width", "channels patch_height patch_width"),
        *class_block("blocks_token_only.0.", 1),
        *class_block("blocks_token_only.1.", 2),
        *norm("norm"),
        *linear("head", "head", "labels", "width", when="num_classes", bias="num_classes"),
    ),
    sizes={
        "patches": lambda c: tokens(c) - 1,
        **PATCH_SIZES,
        "cls_q": class_inner,
        "cls_mlp": lambda c: int(c["embed_dim"] * c["mlp_ratio_token_only"]),
    },
    defaults={
        **DEFAULTS,
        "mlp_ratio_token_only": 4.0,
    },
    projection="blocks.{i}.attn.proj",
    norm="pre",
    plain=False,
    init_std=0.02,
    decoupled="leansurgeon_cait",
    shared=("heads",),
    timm=TimmModels("Cait", reads, "patch_embed.proj"),
)

LEAN_TIMM_CAIT = derive(
    TIMM_CAIT,
    name="leansurgeon_cait",
    model_types=("leansurgeon_cait",),
    keys=replace(TIMM_CAIT.keys, head_dim="head_dim"),
    decoupled=None,
    shared=(),
    adopt=adopt,
    class_keys={"cls_num_heads": "heads", "cls_head_dim": "head_dim"},
    modelling="timm_cait.py",
)
