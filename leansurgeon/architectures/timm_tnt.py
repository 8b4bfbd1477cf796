"""timm's TNT: an inner transformer over the pixels of a patch within every block of an outer one over the patches.

`heads` and the MLP are those of the outer transformer; the inner one stays as it is (timm fixes its MLP at 4).
"""

from __future__ import annotations

from math import ceil

from leansurgeon.architectures.base import Config, Keys, Tensor, exact_ratio
from leansurgeon.architectures.lean import lean
from leansurgeon.architectures.tensors import linear, norm
from leansurgeon.architectures.timm_models import DEFAULTS, Built, TimmModels, image_numbers, mlp, of_timm, pair, tokens


def pixel_grid(config: Config) -> tuple[int, int]:
    """Rows and columns of pixels in a patch."""
    return tuple(ceil(side / config["first_stride"]) for side in pair(config["patch_size"]))


def reads(model: Built) -> Config:
    """The constructor's arguments of a built TNT."""
    block, embed = model.blocks[0], model.pixel_embed
    return {
        **image_numbers(model, embed),
        "global_pool": model.global_pool,
        "embed_dim": model.embed_dim,
        "inner_dim": embed.in_dim,
        "depth": len(model.blocks),
        "num_heads_inner": block.attn_in.num_heads,
        "num_heads_outer": block.attn_out.num_heads,
        "mlp_ratio": exact_ratio(block.mlp.fc1.out_features, model.embed_dim),
        "qkv_bias": block.attn_out.qk.bias is not None,
        "first_stride": embed.proj.stride[0],
        "legacy": embed.legacy,
    }


TIMM_TNT = of_timm(
    "tnt",
    model_types=("tnt_*",),
    keys=Keys("depth", "num_heads_outer", "embed_dim", mlp_ratio="mlp_ratio"),
    block=(
        *norm("norm_in", "inner"),
        *linear("attn_in.qk", "other_attention", "inner+inner", "inner", bias="qkv_bias"),
        *linear("attn_in.v", "other_attention", "inner", "inner", bias="qkv_bias"),
        *linear("attn_in.proj", "other_attention", "inner", "inner"),
        *norm("norm_mlp_in", "inner"),
        *mlp("mlp_in", "inner_mlp", "inner", role="other_mlp"),
        *norm("norm1_proj", "pixels*inner", when="!legacy"),
        *norm("norm1_proj", "inner", when="legacy"),
        *linear("proj", "merge", "width", "pixels*inner", bias="legacy"),
        *norm("norm2_proj", when="!legacy"),
        *norm("norm_out"),
        *linear("attn_out.qk", "qk", "q+kv", "width", bias="qkv_bias"),
        *linear("attn_out.v", "v", "kv", "width", bias="qkv_bias"),
        *linear("attn_out.proj", "o", "width", "q"),
        *norm("norm_mlp"),
        *mlp("mlp"),
    ),
    outer=(
        Tensor("cls_token", "embedding", "1 1 width"),
        Tensor("patch_pos", "embedding", "1 tokens width"),
        Tensor("pixel_pos", "embedding", "1 inner pixel_rows pixel_columns"),
        *linear("pixel_embed.proj", "embedding", "inner", "channels 7 7"),
        *norm("norm1_proj", "pixels*inner", "embedding"),
        *linear("proj", "embedding", "width", "pixels*inner"),
        *norm("norm2_proj", "width", "embedding"),
        *norm("norm"),
        *linear("head", "head", "labels", "width", when="num_classes"),
    ),
    sizes={
        "inner": "inner_dim",
        "inner_mlp": lambda c: 4 * c["inner_dim"],
        "pixel_rows": lambda c: pixel_grid(c)[0],
        "pixel_columns": lambda c: pixel_grid(c)[1],
        "pixels": lambda c: pixel_grid(c)[0] * pixel_grid(c)[1],
        "tokens": tokens,
        "channels": "in_chans",
        "labels": "num_classes",
    },
    defaults={**DEFAULTS, "inner_dim": 48, "first_stride": 4, "qkv_bias": False, "legacy": False},
    projection="blocks.{i}.attn_out.proj",
    timm=TimmModels("TNT", reads, "pixel_embed.proj"),
)

LEAN_TIMM_TNT = lean(TIMM_TNT, "timm_tnt.py")
