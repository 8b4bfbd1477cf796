"""ViT and DeiT of transformers: pre-norm image encoders that store head_dim in their config."""

from leansurgeon.architectures.base import Config, Tensor, derive
from leansurgeon.architectures.facts import Takes
from leansurgeon.architectures.lean import of_transformers
from leansurgeon.architectures.tensors import HEAD_DIM_KEYS, attention, linear, norm


def patches(config: Config) -> int:
    """Image patches, without class tokens."""
    return (config.get("image_size", 224) // config.get("patch_size", 16)) ** 2


VIT = of_transformers(
    "vit",
    keys=HEAD_DIM_KEYS,
    prefixes=("vit.", ""),
    layer="encoder.layer.{i}.",
    block=(
        *attention(
            "attention.", "attention.query attention.key attention.value output.dense", bias="qkv_bias", o_bias=True
        ),
        *linear("intermediate.dense", "up", "mlp", "width"),
        *linear("output.dense", "down", "width", "mlp"),
        *norm("layernorm_before"),
        *norm("layernorm_after"),
    ),
    outer=(
        Tensor("embeddings.cls_token", "embedding", "1 1 width"),
        Tensor("embeddings.position_embeddings", "embedding", "1 tokens width"),
        *linear("embeddings.patch_embeddings.projection", "embedding", "width", "channels patch patch"),
        *norm("layernorm"),
        *linear("/classifier", "head", "labels", "width"),
    ),
    sizes={
        "tokens": lambda c: patches(c) + 1,
        "channels": "num_channels",
        "patch": "patch_size",
        "labels": lambda c: len(c.get("id2label") or {0: 0, 1: 1}),
    },
    defaults={"qkv_bias": True},  # early files do not say it
    projection="layers.{i}.attention.o_proj",
    norm="pre",
    takes=Takes(special_tokens=lambda c: 1),
)

DEIT = derive(
    VIT,
    name="deit",
    model_types=("deit",),
    prefixes=("deit.", ""),
    outer=(Tensor("embeddings.distillation_token", "embedding", "1 1 width"), *VIT.outer),
    sizes={**VIT.sizes, "tokens": lambda c: patches(c) + 2},
    takes=Takes(special_tokens=lambda c: 2),
)
