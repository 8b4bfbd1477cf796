"""timm's CaiT: talking-heads attention, and two class-attention blocks at the end, which surgery leaves as they are
unless --class-attention asks them to follow.

Talking heads mix with each other before and after the softmax. A new head hears the old ones, and the old ones hear
nothing of it, so adding heads is exact. timm's constructor gives the heads to the class attention, too, so a result
with other heads is of `leansurgeon_cait`.
"""

from __future__ import annotations

from leansurgeon.architectures.base import Config, Tensor, exact_ratio
from leansurgeon.architectures.lean import lean
from leansurgeon.architectures.tensors import linear, norm
from leansurgeon.architectures.timm_models import (
    DEFAULTS,
    PATCH_SIZES,
    Built,
    DropPath,
    TimmModels,
    class_blocks,
    class_inner,
    keeping_class_attention,
    mlp,
    of_timm,
    plain_numbers,
    tokens,
)


def reads(model: Built) -> Config:
    """The constructor's arguments of a built Cait."""
    width = model.embed_dim
    return {
        **plain_numbers(model),
        "qkv_bias": model.blocks[0].attn.qkv.bias is not None,
        "init_values": 1e-6 if width >= 768 else 1e-5,  # the published rule; it matters for new models only
        "depth_token_only": len(model.blocks_token_only),
        "mlp_ratio_token_only": exact_ratio(model.blocks_token_only[0].mlp.fc1.out_features, width),
    }


TIMM_CAIT = of_timm(
    "cait",
    model_types=("cait_*",),
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
        *class_blocks("blocks_token_only", "gamma_"),
        *norm("norm"),
        *linear("head", "head", "labels", "width", when="num_classes"),
    ),
    sizes={
        "patches": lambda c: tokens(c) - 1,
        **PATCH_SIZES,
        "cls_q": class_inner,
        "cls_mlp": lambda c: int(c["embed_dim"] * c["mlp_ratio_token_only"]),
    },
    defaults={**DEFAULTS, "mlp_ratio_token_only": 4.0},
    shared=("heads",),
    timm=TimmModels(
        "Cait", reads, "patch_embed.proj", drop_path=DropPath(constant=True, beside=("LayerScaleBlockClassAttn",))
    ),
)

LEAN_TIMM_CAIT = lean(
    TIMM_CAIT,
    "timm_cait.py",
    shared=(),
    adopt=keeping_class_attention(cls_num_heads=lambda c: c["num_heads"]),
    class_keys={"cls_num_heads": "heads", "cls_head_dim": "head_dim"},
)
