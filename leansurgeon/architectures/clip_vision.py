"""The vision towers of CLIP and SigLIP. Both libraries' classes derive head_dim from width // heads.

SigLIP's pooling head attends with as many heads, and has an MLP as wide, as the blocks: it is changed with them.
"""

from math import sqrt

from leansurgeon.architectures.base import Config, Tensor, derive
from leansurgeon.architectures.facts import Takes
from leansurgeon.architectures.lean import of_transformers
from leansurgeon.architectures.tensors import attention, linear, norm
from leansurgeon.architectures.vit import patches


def clip_std(config: Config) -> float:
    """CLIP scales q, k and v by width and depth."""
    factor = config.get("initializer_factor", 1.0)
    return factor * config["hidden_size"] ** -0.5 * (2 * config["num_hidden_layers"]) ** -0.5


CLIP_VISION = of_transformers(
    "clip_vision_model",
    prefixes=("vision_model.", ""),
    layer="encoder.layers.{i}.",
    block=(
        *attention("self_attn.", "q_proj k_proj v_proj out_proj"),
        *linear("mlp.fc1", "up", "mlp", "width"),
        *linear("mlp.fc2", "down", "width", "mlp"),
        *norm("layer_norm1"),
        *norm("layer_norm2"),
    ),
    outer=(
        Tensor("embeddings.class_embedding", "embedding", "width"),
        Tensor("embeddings.patch_embedding.weight", "embedding", "width channels patch patch"),
        Tensor("embeddings.position_embedding.weight", "embedding", "tokens width"),
        *norm("pre_layrnorm"),  # the library's spelling
        *norm("post_layernorm"),
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

POOLS = "vision_use_head"

SIGLIP_VISION = derive(
    CLIP_VISION,
    name="siglip_vision_model",
    model_types=("siglip_vision_model",),
    outer=(
        *linear("embeddings.patch_embedding", "embedding", "width", "channels patch patch"),
        Tensor("embeddings.position_embedding.weight", "embedding", "tokens width"),
        *norm("post_layernorm"),
        Tensor("head.probe", "embedding", "1 1 width", when=POOLS),
        Tensor("head.attention.in_proj_weight", "qkv", "q+kv+kv width", when=POOLS),
        Tensor("head.attention.in_proj_bias", "qkv", "q+kv+kv", when=POOLS),
        *linear("head.attention.out_proj", "o", "width", "q", when=POOLS),
        *norm("head.layernorm", when=POOLS),
        *linear("head.mlp.fc1", "up", "mlp", "width", when=POOLS),
        *linear("head.mlp.fc2", "down", "width", "mlp", when=POOLS),
    ),
    sizes={**CLIP_VISION.sizes, "tokens": patches},
    defaults={POOLS: True},
    init_std=lambda c: sqrt(1 / c["hidden_size"]),  # Xavier of a square matrix
    takes=Takes(),
    plain=False,  # its pooling head attends, too
)
