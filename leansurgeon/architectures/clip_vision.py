"""The vision towers of CLIP and SigLIP. Both libraries' classes derive head_dim from width // heads.

SigLIP's pooling head attends with as many heads, and has an MLP as wide, as the blocks: it is changed with them.
"""

from math import sqrt

from leansurgeon.architectures.base import Architecture, Config, Keys, Tensor, derive
from leansurgeon.architectures.facts import Takes
from leansurgeon.architectures.vit import patches


def clip_std(config: Config) -> float:
    """CLIP scales q, k and v by width and depth."""
    factor = config.get("initializer_factor", 1.0)
    return factor * config["hidden_size"] ** -0.5 * (2 * config["num_hidden_layers"]) ** -0.5


CLIP_VISION = Architecture(
    name="clip_vision_model",
    library="transformers",
    model_types=("clip_vision_model",),
    keys=Keys("num_hidden_layers", "num_attention_heads", "hidden_size", mlp_dim="intermediate_size"),
    prefixes=("vision_model.", ""),
    layer="encoder.layers.{i}.",
    block=(
        Tensor("self_attn.q_proj.weight", "q", "q width"),
        Tensor("self_attn.q_proj.bias", "q", "q"),
        Tensor("self_attn.k_proj.weight", "k", "kv width"),
        Tensor("self_attn.k_proj.bias", "k", "kv"),
        Tensor("self_attn.v_proj.weight", "v", "kv width"),
        Tensor("self_attn.v_proj.bias", "v", "kv"),
        Tensor("self_attn.out_proj.weight", "o", "width q"),
        Tensor("self_attn.out_proj.bias", "o", "width"),
        Tensor("mlp.fc1.weight", "up", "mlp width"),
        Tensor("mlp.fc1.bias", "up", "mlp"),
        Tensor("mlp.fc2.weight", "down", "width mlp"),
        Tensor("mlp.fc2.bias", "down", "width"),
        Tensor("layer_norm1.weight", "norm", "width"),
        Tensor("layer_norm1.bias", "norm", "width"),
        Tensor("layer_norm2.weight", "norm", "width"),
        Tensor("layer_norm2.bias", "norm", "width"),
    ),
    outer=(
        Tensor("embeddings.class_embedding", "embedding", "width"),
        Tensor("embeddings.patch_embedding.weight", "embedding", "width channels patch patch"),
        Tensor("embeddings.position_embedding.weight", "embedding", "tokens width"),
        Tensor("pre_layrnorm.weight", "norm", "width"),  # the library's spelling
        Tensor("pre_layrnorm.bias", "norm", "width"),
        Tensor("post_layernorm.weight", "norm", "width"),
        Tensor("post_layernorm.bias", "norm", "width"),
    ),
    sizes={
        "channels": lambda c: c.get("num_channels", 3),
        "patch": "patch_size",
        "tokens": lambda c: patches(c) + 1,
    },
    projection="encoder.layers.{i}.self_attn.out_proj",
    norm="pre",
    init_std=clip_std,
    takes=Takes(special_tokens=lambda c: 1),
)

SIGLIP_VISION = derive(
    CLIP_VISION,
    name="siglip_vision_model",
    model_types=("siglip_vision_model",),
    outer=(
        Tensor("embeddings.patch_embedding.weight", "embedding", "width channels patch patch"),
        Tensor("embeddings.patch_embedding.bias", "embedding", "width"),
        Tensor("embeddings.position_embedding.weight", "embedding", "tokens width"),
        Tensor("post_layernorm.weight", "norm", "width"),
        Tensor("post_layernorm.bias", "norm", "width"),
        *(
            Tensor(f"head.{name}", role, axes, when="vision_use_head")
            for name, role, axes in (
                ("probe", "embedding", "1 1 width"),
                ("attention.in_proj_weight", "qkv", "q+kv+kv width"),
                ("attention.in_proj_bias", "qkv", "q+kv+kv"),
                ("attention.out_proj.weight", "o", "width q"),
                ("attention.out_proj.bias", "o", "width"),
                ("layernorm.weight", "norm", "width"),
                ("layernorm.bias", "norm", "width"),
                ("mlp.fc1.weight", "up", "mlp width"),
                ("mlp.fc1.bias", "up", "mlp"),
                ("mlp.fc2.weight", "down", "width mlp"),
                ("mlp.fc2.bias", "down", "width"),
            )
        ),
    ),
    sizes={**CLIP_VISION.sizes, "tokens": patches},
    defaults={"vision_use_head": True},
    init_std=lambda c: sqrt(1 / c["hidden_size"]),  # Xavier of a square matrix
    takes=Takes(),
    plain=False,  # its pooling head attends, too
)
