"""timm's XCiT: cross-covariance attention between channels, a local convolution, and two class-attention blocks at the
end, which surgery leaves as they are unless
--class-attention asks them to follow.

`heads` are those of the cross-covariance attention. timm's constructor gives the same number to the class attention, so
a result with other heads or another MLP is of `leansurgeon_xcit`, which holds the two apart.
"""

from __future__ import annotations

from leansurgeon.architectures.base import Config, Tensor, exact_ratio
from leansurgeon.architectures.lean import lean
from leansurgeon.architectures.tensors import linear, norm
from leansurgeon.architectures.timm_models import (
    Built,
    DropPath,
    TimmModels,
    batch_norm,
    class_blocks,
    class_inner,
    keeping_class_attention,
    mlp,
    of_timm,
    square,
)


def reads(model: Built) -> Config:
    """The constructor's arguments of a built Xcit."""
    block, last = model.blocks[0], model.cls_attn_blocks[0]
    return {
        "img_size": square(model.patch_embed.img_size),
        "patch_size": model.patch_embed.patch_size,
        "in_chans": model.patch_embed.proj[0][0].in_channels,
        "num_classes": model.num_classes,
        "global_pool": model.global_pool,
        "embed_dim": model.embed_dim,
        "depth": len(model.blocks),
        "num_heads": block.attn.num_heads,
        "mlp_ratio": exact_ratio(block.mlp.fc1.out_features, model.embed_dim),
        "qkv_bias": block.attn.qkv.bias is not None,
        "cls_attn_layers": len(model.cls_attn_blocks),
        "use_pos_embed": model.pos_embed is not None,
        "eta": 1.0 if len(model.blocks) <= 18 else 1e-5,  # the published rule; it matters for new models only
        "tokens_norm": bool(last.tokens_norm),
    }


def stem() -> tuple[Tensor, ...]:
    """Three convolutions of stride 2 for patches of 8, four for 16."""
    into, tensors = "channels", ()
    for i, out in enumerate(("stem0", "stem1", "stem2", "width")):
        when = {"when": "patch_size=16"} if i == 3 else {}
        tensors += linear(f"patch_embed.proj.{2 * i}.0", "embedding", out, f"{into} 3 3", bias=False, **when)
        tensors += batch_norm(f"patch_embed.proj.{2 * i}.1", out, "embedding", **when)
        into = out
    return tensors


TIMM_XCIT = of_timm(
    "xcit",
    model_types=("xcit_*",),
    block=(
        *(Tensor(f"gamma{i}", "norm", "width") for i in (1, 2, 3)),
        *norm("norm1"),
        Tensor("attn.temperature", "head_param", "heads 1 1", new=1.0),
        *linear("attn.qkv", "qkv", "q+kv+kv", "width", bias="qkv_bias"),
        *linear("attn.proj", "o", "width", "q"),
        *norm("norm3"),
        *linear("local_mp.conv1", "conv", "width", "1 3 3"),
        *batch_norm("local_mp.bn", "width"),
        *linear("local_mp.conv2", "conv", "width", "1 3 3"),
        *norm("norm2"),
        *mlp("mlp"),
    ),
    outer=(
        Tensor("cls_token", "embedding", "1 1 width"),
        *stem(),
        *linear("pos_embed.token_projection", "embedding", "width", "64 1 1", when="use_pos_embed"),
        *class_blocks("cls_attn_blocks", "gamma"),
        *norm("norm"),
        *linear("head", "head", "labels", "width", when="num_classes"),
    ),
    sizes={
        "channels": "in_chans",
        "stem0": lambda c: c["embed_dim"] * 2 // c["patch_size"],
        "stem1": lambda c: c["embed_dim"] * 4 // c["patch_size"],
        "stem2": lambda c: c["embed_dim"] * 8 // c["patch_size"],
        "labels": "num_classes",
        "cls_q": class_inner,
        "cls_mlp": lambda c: int(c["embed_dim"] * c.get("cls_mlp_ratio", c.get("mlp_ratio", 4))),
    },
    defaults={"patch_size": 16, "in_chans": 3, "num_classes": 1000, "qkv_bias": True, "use_pos_embed": True},
    heads_entangled=(
        "attends between channels, not between tokens, so the columns of a head's values are not independent"
    ),
    positions="none",
    shared=("heads", "mlp_dim"),
    timm=TimmModels(
        "Xcit", reads, "patch_embed.proj.0.0", drop_path=DropPath(constant=True, beside=("ClassAttentionBlock",))
    ),
)

LEAN_TIMM_XCIT = lean(
    TIMM_XCIT,
    "timm_xcit.py",
    shared=(),
    adopt=keeping_class_attention(
        cls_num_heads=lambda c: c["num_heads"], cls_mlp_ratio=lambda c: c.get("mlp_ratio", 4)
    ),
    class_keys={"cls_num_heads": "heads", "cls_head_dim": "head_dim"},
)
