"""timm's Swin Transformer and SwinV2: windows in four stages, every second layer shifted, so layers go in pairs.

Swin's constructor takes `head_dim` itself, and no modelling file is needed. Every head has its column in the table of
relative positions. SwinV2 has a small network in its place, with an output for every head, and a temperature for every
head; its heads can be split only. SwinV2-CR and the other descendants are not declared.
"""

from __future__ import annotations

from dataclasses import replace
from math import log

from leansurgeon.architectures.base import Config, Keys, Tensor, derive, exact_ratio
from leansurgeon.architectures.tensors import linear, norm
from leansurgeon.architectures.timm_models import (
    DEFAULTS,
    PATCH_SIZES,
    Built,
    TimmModels,
    grid,
    image_numbers,
    mlp,
    of_timm,
)

STAGES = 4


def reads(model: Built) -> Config:
    """The constructor's arguments of a built SwinTransformer."""
    blocks = [stage.blocks[0] for stage in model.layers]
    heads = [block.attn.num_heads for block in blocks]
    return {
        **image_numbers(model, model.patch_embed),
        "embed_dim": blocks[0].attn.qkv.in_features,
        "depths": [len(stage.blocks) for stage in model.layers],
        "num_heads": heads,
        "head_dim": [block.attn.proj.in_features // h for block, h in zip(blocks, heads, strict=True)],
        "window_size": blocks[0].attn.window_size[0],
        "mlp_ratio": [exact_ratio(block.mlp.fc1.out_features, block.mlp.fc1.in_features) for block in blocks],
        "qkv_bias": blocks[0].attn.qkv.bias is not None,
    }


def offsets(config: Config) -> list[int]:
    """Relative positions within a window of every stage; timm shrinks a window that does not fit the image."""
    counts = []
    for stage in range(STAGES):
        sides = [min(-(-side // 2**stage), config["window_size"]) for side in grid(config)]
        counts.append((2 * sides[0] - 1) * (2 * sides[1] - 1))
    return counts


def downsample(stage: int) -> tuple[Tensor, ...]:
    """The norm and the matrix between two stages."""
    name, merged = f"layers.{stage}.downsample.", f"width{stage - 1}*4"
    return (*norm(f"{name}norm", merged), *linear(f"{name}reduction", "merge", f"width{stage}", merged, bias=False))


TIMM_SWIN = of_timm(
    "swin",
    model_types=("swin_tiny*", "swin_small*", "swin_base*", "swin_large*"),
    keys=Keys("depths", "num_heads", "embed_dim", mlp_ratio="mlp_ratio", head_dim="head_dim", width_grows=2),
    layer="layers.{s}.blocks.{i}.",
    block=(
        *norm("norm1"),
        Tensor("attn.relative_position_bias_table", "head_param", "offsets heads"),
        *linear("attn.qkv", "qkv", "q+kv+kv", "width", bias="qkv_bias"),
        *linear("attn.proj", "o", "width", "q"),
        *norm("norm2"),
        *mlp("mlp"),
    ),
    outer=(
        *linear("patch_embed.proj", "embedding", "width0", "channels patch_height patch_width"),
        *norm("patch_embed.norm", "width0", "embedding"),
        *(tensor for stage in range(1, STAGES) for tensor in downsample(stage)),
        *norm("norm"),
        *linear("head.fc", "head", "labels", "width", when="num_classes"),
    ),
    sizes={**PATCH_SIZES, "offsets": offsets},
    defaults={**DEFAULTS, "patch_size": 4, "window_size": 7},
    projection="layers.{s}.blocks.{i}.attn.proj",
    heads_unsplittable="attends within windows, not over all tokens",
    positions="none",
    period=2,
    timm=TimmModels("SwinTransformer", reads, "patch_embed.proj", "head.fc"),
    decoupled=None,
)


def reads_v2(model: Built) -> Config:
    """The constructor's arguments of a built SwinTransformerV2."""
    blocks = [stage.blocks[0] for stage in model.layers]
    return {
        **image_numbers(model, model.patch_embed),
        "embed_dim": blocks[0].attn.qkv.in_features,
        "depths": [len(stage.blocks) for stage in model.layers],
        "num_heads": [block.attn.num_heads for block in blocks],
        "window_size": blocks[0].attn.window_size[0],
        "mlp_ratio": exact_ratio(blocks[0].mlp.fc1.out_features, blocks[0].mlp.fc1.in_features),
        "qkv_bias": blocks[0].attn.q_bias is not None,
        "pretrained_window_sizes": [block.attn.pretrained_window_size[0] for block in blocks],
    }


TIMM_SWIN_V2 = derive(
    TIMM_SWIN,
    name="timm_swin_v2",
    model_types=("swinv2_tiny*", "swinv2_small*", "swinv2_base*", "swinv2_large*"),
    keys=replace(TIMM_SWIN.keys, head_dim=None, one_ratio=True),
    block=(
        Tensor("attn.logit_scale", "head_param", "heads 1 1", new=log(10)),
        *linear("attn.cpb_mlp.0", "positions", "512", "2"),
        Tensor("attn.cpb_mlp.2.weight", "head_param", "heads 512"),
        Tensor("attn.q_bias", "q", "q", when="qkv_bias"),
        Tensor("attn.v_bias", "v", "kv", when="qkv_bias"),
        Tensor("attn.qkv.weight", "qkv", "q+kv+kv width"),
        *linear("attn.proj", "o", "width", "q"),
        *norm("norm1"),
        *mlp("mlp"),
        *norm("norm2"),
    ),
    outer=tuple(
        replace(t, axes=f"width{t.name.split('.')[1]}") if ".downsample.norm." in t.name else t for t in TIMM_SWIN.outer
    ),
    norm="post",
    timm=TimmModels("SwinTransformerV2", reads_v2, "patch_embed.proj", "head.fc"),
)
