"""timm's VOLO: a stage of outlook attention, three of self-attention, and two class-attention blocks at the end, which
surgery leaves as they are.

`heads` are those of the outlook attention and the self-attention. timm's named models refuse `layers` and `num_heads`
as arguments, and its constructor gives the heads and the MLP of the last stage to the class attention, too; so every
result is of `leansurgeon_volo`. The outlook's attention map is made by a layer of kernel^4 rows for every head, so it
grows with the heads even where the width is split.
"""

from __future__ import annotations

from leansurgeon.architectures.base import Blocks, Config, Keys, Tensor, exact_ratio
from leansurgeon.architectures.lean import lean
from leansurgeon.architectures.tensors import linear, norm
from leansurgeon.architectures.timm_models import (
    DEFAULTS,
    Built,
    DropPath,
    TimmModels,
    batch_norm,
    class_block,
    keeping_class_attention,
    mlp,
    of_timm,
)


def reads(model: Built) -> Config:
    """The constructor's arguments of a built VOLO."""
    stages = [part for part in model.network if hasattr(part, "__len__")]
    embed, widths = model.patch_embed, [stage[0].norm1.normalized_shape[0] for stage in stages]
    return {
        "img_size": model.pos_embed.shape[1] * embed.proj.stride[0] * 2 * model.pooling_scale,
        "in_chans": embed.conv[0].in_channels,
        "num_classes": model.num_classes,
        "global_pool": model.global_pool,
        "patch_size": embed.proj.stride[0] * 2,
        "stem_hidden_dim": embed.proj.in_channels,
        "layers": [len(stage) for stage in stages],
        "embed_dims": widths,
        "num_heads": [stage[0].attn.num_heads for stage in stages],
        "mlp_ratio": [
            exact_ratio(stage[0].mlp.fc1.out_features, width) for stage, width in zip(stages, widths, strict=True)
        ],
        "qkv_bias": stages[0][0].attn.v.bias is not None,
        "use_aux_head": model.use_aux_head,
        "pooling_scale": model.pooling_scale,
    }


def last_ratio(args: Config) -> float:
    """MLP ratio of the last stage."""
    ratio = args.get("mlp_ratio", 3)
    return ratio[-1] if isinstance(ratio, list | tuple) else ratio


def class_mlp(args: Config) -> int:
    """Width of the MLP of the class attention."""
    return int(args["embed_dims"][-1] * args.get("cls_mlp_ratio", last_ratio(args)))


def kv_block(name: str) -> tuple[Tensor, ...]:
    """A block of class attention, k and v by one matrix."""
    attention = (
        *linear(f"{name}attn.kv", "other_attention", "width+width", "width", bias="qkv_bias"),
        *linear(f"{name}attn.q", "other_attention", "width", "width", bias="qkv_bias"),
        *linear(f"{name}attn.proj", "other_attention", "width", "width"),
    )
    return class_block(name, attention)


def block(*attention: Tensor) -> tuple[Tensor, ...]:
    """A block around this attention."""
    return (*norm("norm1"), *attention, *linear("attn.proj", "o", "width", "q"), *norm("norm2"), *mlp("mlp"))


OUTLOOK = block(
    *linear("attn.v", "v", "kv", "width", bias="qkv_bias"),
    *linear("attn.attn", "head_param", "heads*81", "width"),
)
SELF_ATTENTION = block(*linear("attn.qkv", "qkv", "q+kv+kv", "width", bias="qkv_bias"))


def stage(part: int, tensors: tuple[Tensor, ...]) -> Blocks:
    """The stage that is this part of timm's network."""
    return Blocks(f"network.{part}.{{i}}.", tensors, (f"network.{part}.{{i}}.attn.proj",))


def grid(args: Config) -> int:
    """Rows (and columns) of tokens behind the pooling."""
    return args["img_size"] // args["patch_size"] // args["pooling_scale"]


TIMM_VOLO = of_timm(
    "volo",
    model_types=("volo_*",),
    keys=Keys("layers", "num_heads", "embed_dims", mlp_ratio="mlp_ratio", mlp_default=3),
    stages=(stage(0, OUTLOOK), stage(2, SELF_ATTENTION), stage(3, SELF_ATTENTION), stage(4, SELF_ATTENTION)),
    outer=(
        Tensor("pos_embed", "embedding", "1 grid grid width"),
        Tensor("cls_token", "embedding", "1 1 width"),
        *linear("patch_embed.conv.0", "embedding", "stem", "channels 7 7", bias=False),
        *batch_norm("patch_embed.conv.1", "stem", "embedding"),
        *linear("patch_embed.conv.3", "embedding", "stem", "stem 3 3", bias=False),
        *batch_norm("patch_embed.conv.4", "stem", "embedding"),
        *linear("patch_embed.conv.6", "embedding", "stem", "stem 3 3", bias=False),
        *batch_norm("patch_embed.conv.7", "stem", "embedding"),
        *linear("patch_embed.proj", "embedding", "width0", "stem patch patch"),
        *linear("network.1.proj", "merge", "width1", "width0 2 2"),
        *kv_block("post_network.0."),
        *kv_block("post_network.1."),
        *linear("aux_head", "head", "labels", "width", when="use_aux_head"),
        *norm("norm"),
        *linear("head", "head", "labels", "width", when="num_classes"),
    ),
    sizes={
        "grid": grid,
        "channels": "in_chans",
        "stem": "stem_hidden_dim",
        "patch": lambda c: c["patch_size"] // 2,
        "labels": "num_classes",
        "cls_mlp": class_mlp,
    },
    defaults={
        **DEFAULTS,
        "patch_size": 8,
        "stem_hidden_dim": 64,
        "pooling_scale": 2,
        "qkv_bias": False,
        "use_aux_head": True,
    },
    layer="",
    projection="",
    rebuilds=False,
    timm=TimmModels(
        "VOLO", reads, "patch_embed.conv.0", drop_path=DropPath(beside=("ClassBlock",), spared=("Outlooker",))
    ),
)

LEAN_TIMM_VOLO = lean(
    TIMM_VOLO,
    "timm_volo.py",
    rebuilds=True,
    adopt=keeping_class_attention(cls_num_heads=lambda c: c["num_heads"][-1], cls_mlp_ratio=last_ratio),
)
