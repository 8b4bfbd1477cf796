"""DINOv2 (also with registers) and DINOv3 ViT: pre-norm image encoders with layer scale.

DINOv2 reads head_dim from its config, DINOv3 does not. The SwiGLU form of DINOv2 (the giant model) rounds its MLP by a
rule that its config cannot undo; it is inferred, and its MLP stays as it is.
"""

from leansurgeon.architectures.base import Architecture, Keys, Tensor, derive
from leansurgeon.architectures.facts import Takes
from leansurgeon.architectures.vit import VIT

SCALES = (
    Tensor("layer_scale1.lambda1", "norm", "width"),
    Tensor("layer_scale2.lambda1", "norm", "width"),
)
NORMS = (
    Tensor("norm1.weight", "norm", "width"),
    Tensor("norm1.bias", "norm", "width"),
    Tensor("norm2.weight", "norm", "width"),
    Tensor("norm2.bias", "norm", "width"),
)
# Names of stages, one a layer, and what a backbone gives out: the library makes them anew from the depth.
BACKBONE = ("stage_names", "out_features", "out_indices")
WITH_REGISTERS = Takes(special_tokens=lambda c: 1 + c.get("num_register_tokens", 0), any_image_size=True)

DINOV2 = derive(
    VIT,
    name="dinov2",
    model_types=("dinov2",),
    when="!use_swiglu_ffn",
    keys=Keys(
        "num_hidden_layers",
        "num_attention_heads",
        "hidden_size",
        mlp_ratio="mlp_ratio",
        whole_ratio=True,
        head_dim="head_dim",
    ),
    prefixes=("dinov2.", ""),
    block=(
        *(t for t in VIT.block if t.name.startswith("attention.")),
        Tensor("mlp.fc1.weight", "up", "mlp width"),
        Tensor("mlp.fc1.bias", "up", "mlp"),
        Tensor("mlp.fc2.weight", "down", "width mlp"),
        Tensor("mlp.fc2.bias", "down", "width"),
        *NORMS,
        *SCALES,
    ),
    outer=(
        Tensor("embeddings.mask_token", "embedding", "1 width", when="use_mask_token"),
        *(t for t in VIT.outer if not t.name.startswith("/")),
        Tensor("/classifier.weight", "head", "labels width+width"),  # class token and mean of the patches
        Tensor("/classifier.bias", "head", "labels"),
    ),
    defaults={"qkv_bias": True, "use_mask_token": True, "use_swiglu_ffn": False},
    projection="encoder.layer.{i}.attention.o_proj",
    forget=BACKBONE,
    takes=Takes(special_tokens=lambda c: 1, any_image_size=True),
)

DINOV2_WITH_REGISTERS = derive(
    DINOV2,
    name="dinov2_with_registers",
    model_types=("dinov2_with_registers",),
    prefixes=("dinov2_with_registers.", ""),
    outer=(Tensor("embeddings.register_tokens", "embedding", "1 registers width"), *DINOV2.outer),
    sizes={**DINOV2.sizes, "registers": "num_register_tokens"},
    may_be_zero=("num_register_tokens",),
    takes=WITH_REGISTERS,
)

DINOV3_VIT = Architecture(
    name="dinov3_vit",
    library="transformers",
    model_types=("dinov3_vit",),
    keys=Keys("num_hidden_layers", "num_attention_heads", "hidden_size", mlp_dim="intermediate_size"),
    layer="layer.{i}.",
    block=(
        Tensor("attention.q_proj.weight", "q", "q width"),
        Tensor("attention.q_proj.bias", "q", "q", when="query_bias"),
        Tensor("attention.k_proj.weight", "k", "kv width"),
        Tensor("attention.k_proj.bias", "k", "kv", when="key_bias"),
        Tensor("attention.v_proj.weight", "v", "kv width"),
        Tensor("attention.v_proj.bias", "v", "kv", when="value_bias"),
        Tensor("attention.o_proj.weight", "o", "width q"),
        Tensor("attention.o_proj.bias", "o", "width", when="proj_bias"),
        Tensor("mlp.gate_proj.weight", "gate", "mlp width", when="use_gated_mlp"),
        Tensor("mlp.gate_proj.bias", "gate", "mlp", when="gate_bias"),
        Tensor("mlp.up_proj.weight", "up", "mlp width"),
        Tensor("mlp.up_proj.bias", "up", "mlp", when="mlp_bias"),
        Tensor("mlp.down_proj.weight", "down", "width mlp"),
        Tensor("mlp.down_proj.bias", "down", "width", when="mlp_bias"),
        *NORMS,
        *SCALES,
    ),
    outer=(
        Tensor("embeddings.cls_token", "embedding", "1 1 width"),
        Tensor("embeddings.mask_token", "embedding", "1 1 width"),
        Tensor("embeddings.register_tokens", "embedding", "1 registers width"),
        Tensor("embeddings.patch_embeddings.weight", "embedding", "width channels patch patch"),
        Tensor("embeddings.patch_embeddings.bias", "embedding", "width"),
        Tensor("norm.weight", "norm", "width"),
        Tensor("norm.bias", "norm", "width"),
    ),
    sizes={"channels": "num_channels", "patch": "patch_size", "registers": "num_register_tokens"},
    may_be_zero=("num_register_tokens",),
    switches={"gate_bias": lambda c: c.get("use_gated_mlp") and c["mlp_bias"]},
    defaults={"query_bias": True, "value_bias": True, "proj_bias": True, "mlp_bias": True, "num_register_tokens": 0},
    projection="model.layer.{i}.attention.o_proj",
    norm="pre",
    positions="rope-2d",  # the axes of an image take turns, so head_dim is a multiple of four
    forget=BACKBONE,
    takes=WITH_REGISTERS,
)
