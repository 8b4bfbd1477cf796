"""timm's DaViT: four stages whose blocks hold a window attention between tokens and an attention between channels, each
with an MLP of its own.

`heads` are the window heads and the channel groups, which are the same number. The Florence-2 variants (`*_fl`) name
their blocks otherwise and are not declared.
"""

from __future__ import annotations

from dataclasses import replace

from leansurgeon.architectures.base import Config, Keys, Tensor, exact_ratio
from leansurgeon.architectures.lean import lean
from leansurgeon.architectures.tensors import linear, norm
from leansurgeon.architectures.timm_models import Built, DropPath, TimmModels, mlp, of_timm

STAGES = 4


def reads(model: Built) -> Config:
    """The constructor's arguments of a built DaVit."""
    first = [stage.blocks[0][0] for stage in model.stages]
    return {
        "in_chans": model.stem.conv.in_channels,
        "num_classes": model.num_classes,
        "depths": [len(stage.blocks) for stage in model.stages],
        "embed_dims": [block.attn.qkv.in_features for block in first],
        "num_heads": [block.attn.num_heads for block in first],
        "window_size": first[0].window_size[0],
        "mlp_ratio": exact_ratio(first[0].mlp.fc1.out_features, first[0].mlp.fc1.in_features),
        "qkv_bias": first[0].attn.qkv.bias is not None,
        "down_kernel_size": model.stages[1].downsample.conv.kernel_size[0],
    }


def half(number: int) -> tuple[Tensor, ...]:
    """The window half (0) or the channel half (1) of a block; each chooses its own heads and units."""
    name, more = f"{number}.", {"group": number}
    # Between channels k and v make the scores, and what timm calls q is weighed by them.
    stacked = "vkq" if number else "qkv"
    return (
        *linear(f"{name}cpe1.proj", "conv", "width", "1 3 3"),
        *norm(f"{name}norm1"),
        *linear(f"{name}attn.qkv", stacked, "q+kv+kv", "width", bias="qkv_bias", **more),
        *linear(f"{name}attn.proj", "o", "width", "q", **more),
        *linear(f"{name}cpe2.proj", "conv", "width", "1 3 3"),
        *norm(f"{name}norm2"),
        *mlp(f"{name}mlp", **more),
    )


def downsample(stage: int) -> tuple[Tensor, ...]:
    """The norm and the convolution between two stages."""
    before, after, name = f"width{stage - 1}", f"width{stage}", f"stages.{stage}.downsample."
    return (*norm(f"{name}norm", before), *linear(f"{name}conv", "merge", after, f"{before} down down"))


TIMM_DAVIT = of_timm(
    "davit",
    model_types=("davit_*",),
    keys=Keys("depths", "num_heads", "embed_dims", mlp_ratio="mlp_ratio", one_ratio=True),
    layer="stages.{s}.blocks.{i}.",
    block=(*half(0), *half(1)),
    outer=(
        *linear("stem.conv", "embedding", "width0", "channels 7 7"),
        *norm("stem.norm", "width0", "embedding"),
        *(tensor for stage in range(1, STAGES) for tensor in downsample(stage)),
        *norm("head.norm"),
        *linear("head.fc", "head", "labels", "width", when="num_classes"),
    ),
    sizes={"channels": "in_chans", "down": "down_kernel_size", "labels": "num_classes"},
    defaults={"in_chans": 3, "num_classes": 1000, "qkv_bias": True, "down_kernel_size": 2},
    projection=("stages.{s}.blocks.{i}.0.attn.proj", "stages.{s}.blocks.{i}.1.attn.proj"),
    positions="none",
    timm=TimmModels(
        "DaVit",
        reads,
        "stem.conv",
        "head.fc",
        fixed_input_size=False,
        drop_path=DropPath(halves=("SpatialBlock", "ChannelBlock")),
    ),
)

LEAN_TIMM_DAVIT = lean(
    TIMM_DAVIT,
    "timm_davit.py",
    keys=replace(TIMM_DAVIT.keys, head_dim="head_dim", one_ratio=False),
)
