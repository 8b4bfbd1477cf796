"""ViT and DeiT of transformers: pre-norm image encoders that store head_dim in their config."""

from leansurgeon.architectures.base import Architecture, Config, Keys, Tensor, derive
from leansurgeon.architectures.facts import Takes


def patches(config: Config) -> int:
    """Image patches, without class tokens."""
    return (config.get("image_size", 224) // config.get("patch_size", 16)) ** 2


VIT = Architecture(
    name="vit",
    library="transformers",
    model_types=("vit",),
    keys=Keys(
        "num_hidden_layers", "num_attention_heads", "hidden_size", mlp_dim="intermediate_size", head_dim="head_dim"
    ),
    prefixes=("vit.", ""),
    layer="encoder.layer.{i}.",
    block=(
        Tensor("attention.attention.query.weight", "q", "q width"),
        Tensor("attention.attention.query.bias", "q", "q", when="qkv_bias"),
        Tensor("attention.attention.key.weight", "k", "kv width"),
        Tensor("attention.attention.key.bias", "k", "kv", when="qkv_bias"),
        Tensor("attention.attention.value.weight", "v", "kv width"),
        Tensor("attention.attention.value.bias", "v", "kv", when="qkv_bias"),
        Tensor("attention.output.dense.weight", "o", "width q"),
        Tensor("attention.output.dense.bias", "o", "width"),
        Tensor("intermediate.dense.weight", "up", "mlp width"),
        Tensor("intermediate.dense.bias", "up", "mlp"),
        Tensor("output.dense.weight", "down", "width mlp"),
        Tensor("output.dense.bias", "down", "width"),
        Tensor("layernorm_before.weight", "norm", "width"),
        Tensor("layernorm_before.bias", "norm", "width"),
        Tensor("layernorm_after.weight", "norm", "width"),
        Tensor("layernorm_after.bias", "norm", "width"),
    ),
    outer=(
        Tensor("embeddings.cls_token", "embedding", "1 1 width"),
        Tensor("embeddings.position_embeddings", "embedding", "1 tokens width"),
        Tensor("embeddings.patch_embeddings.projection.weight", "embedding", "width channels patch patch"),
        Tensor("embeddings.patch_embeddings.projection.bias", "embedding", "width"),
        Tensor("layernorm.weight", "norm", "width"),
        Tensor("layernorm.bias", "norm", "width"),
        Tensor("/classifier.weight", "head", "labels width"),
        Tensor("/classifier.bias", "head", "labels"),
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
