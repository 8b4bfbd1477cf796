"""DINOv2 (also with registers) and DINOv3 ViT: pre-norm image encoders with layer scale.

DINOv2 reads head_dim from its config, DINOv3 does not. The SwiGLU form of DINOv2 (the giant model) rounds its MLP by a
rule that its config cannot undo; it is inferred, and its MLP stays as it is.
"""

from dataclasses import replace

from leansurgeon.architectures.base import Tensor, derive
from leansurgeon.architectures.facts import Takes
from leansurgeon.architectures.lean import of_transformers
from leansurgeon.architectures.tensors import HEAD_DIM_KEYS, linear, norm
from leansurgeon.architectures.vit import VIT

SCALES = (
    Tensor("layer_scale1.lambda1", "norm", "width"),
    Tensor("layer_scale2.lambda1", "norm", "width"),
)
NORMS = (
    *norm("norm1"),
    *norm("norm2"),
)
# Names of stages, one a layer, and what a backbone gives out: the library makes them anew from the depth.
BACKBONE = ("stage_names", "out_features", "out_indices")
WITH_REGISTERS = Takes(special_tokens=lambda c: 1 + c.get("num_register_tokens", 0), any_image_size=True)

DINOV2 = derive(
    VIT,
    name="dinov2",
    model_types=("dinov2",),
    when="!use_swiglu_ffn",
    keys=replace(HEAD_DIM_KEYS, mlp_dim=None, mlp_ratio="mlp_ratio", whole_ratio=True),
    prefixes=("dinov2.", ""),
    block=(
        *(t for t in VIT.block if t.name.startswith("attention.")),
        *linear("mlp.fc1", "up", "mlp", "width"),
        *linear("mlp.fc2", "down", "width", "mlp"),
        *NORMS,
        *SCALES,
    ),
    outer=(
        Tensor("embeddings.mask_token", "embedding", "1 width", when="use_mask_token"),
        *(t for t in VIT.outer if not t.name.startswith("/")),
        *linear("/classifier", "head", "labels", "width+width"),  # class token and mean of the patches
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

DINOV3_VIT = of_transformers(
    "dinov3_vit",
    layer="layer.{i}.",
    block=(
        *linear("attention.q_proj", "q", "q", "width", bias="query_bias"),
        *linear("attention.k_proj", "k", "kv", "width", bias="key_bias"),
        *linear("attention.v_proj", "v", "kv", "width", bias="value_bias"),
        *linear("attention.o_proj", "o", "width", "q", bias="proj_bias"),
        *linear("mlp.gate_proj", "gate", "mlp", "width", when="use_gated_mlp", bias="gate_bias"),
        *linear("mlp.up_proj", "up", "mlp", "width", bias="mlp_bias"),
        *linear("mlp.down_proj", "down", "width", "mlp", bias="mlp_bias"),
        *NORMS,
        *SCALES,
    ),
    outer=(
        Tensor("embeddings.cls_token", "embedding", "1 1 width"),
        Tensor("embeddings.mask_token", "embedding", "1 1 width"),
        Tensor("embeddings.register_tokens", "embedding", "1 registers width"),
        *linear("embeddings.patch_embeddings", "embedding", "width", "channels patch patch"),
        *norm("norm"),
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
