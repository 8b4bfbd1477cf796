"""timm's EVA giant and the tiny and small EVA-02: a ViT with biases on queries and values only; EVA-02 adds rotary
positions and a gated MLP.

The base and large EVA-02 normalise the hidden layer of the MLP, and EVA large is a VisionTransformer in timm; they are
not declared.
"""

from __future__ import annotations

from leansurgeon.architectures.base import Config, Tensor
from leansurgeon.architectures.lean import lean
from leansurgeon.architectures.tensors import linear, norm
from leansurgeon.architectures.timm_models import (
    BEIT_OUTER,
    DEFAULTS,
    HIDDEN_INPUT,
    PATCH_SIZES,
    Built,
    TimmModels,
    is_norm,
    of_timm,
    plain_numbers,
    tokens,
)


def reads(model: Built) -> Config:
    """The constructor's arguments of a built Eva."""
    block, rope = model.blocks[0], model.rope
    reference = getattr(rope, "ref_feat_shape", None)
    return {
        **plain_numbers(model),
        "qkv_bias": getattr(block.attn, "q_bias", None) is not None,
        "swiglu_mlp": not hasattr(block.mlp, "fc1") or block.mlp.fc1.out_features != block.mlp.fc2.in_features,
        "use_abs_pos_emb": model.pos_embed is not None,
        "use_rot_pos_emb": rope is not None,
        "ref_feat_shape": list(reference) if reference else None,
        "use_fc_norm": is_norm(model.fc_norm),
    }


def unlike(model: Built) -> str | None:
    """The parts of an Eva that the declaration does not know, in words."""
    kinds = {type(block).__name__ for block in model.blocks} - {"EvaBlock"} if type(model).__name__ == "Eva" else ()
    return f"blocks of the kind {', '.join(sorted(kinds))}" if kinds else None


TIMM_EVA = of_timm(
    "eva",
    model_types=("eva_*", "eva02_*"),
    block=(
        *norm("norm1"),
        Tensor("attn.q_bias", "q", "q", when="qkv_bias"),
        Tensor("attn.v_bias", "v", "kv", when="qkv_bias"),
        Tensor("attn.qkv.weight", "qkv", "q+kv+kv width"),
        *linear("attn.proj", "o", "width", "q"),
        *norm("norm2"),
        *linear("mlp.fc1", "up", "mlp+mlp", "width", when="swiglu_mlp"),
        *linear("mlp.fc1", "up", "mlp", "width", when="!swiglu_mlp"),
        *linear("mlp.fc2", "down", "width", "mlp"),
    ),
    outer=BEIT_OUTER,
    sizes={"tokens": tokens, **PATCH_SIZES},
    defaults={**DEFAULTS, "swiglu_mlp": False, "use_abs_pos_emb": True, "use_fc_norm": True},
    rotates_when="use_rot_pos_emb",
    heads_unsplittable=HIDDEN_INPUT,
    timm=TimmModels("Eva", reads, "patch_embed.proj", unlike=unlike),
)

LEAN_TIMM_EVA = lean(TIMM_EVA, "timm_eva.py")
