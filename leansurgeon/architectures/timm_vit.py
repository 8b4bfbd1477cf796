"""timm's VisionTransformer (ViT, DeiT): pre-norm, fused qkv, head_dim derived from embed_dim // num_heads. No timm
import at module level.

timm keeps the numbers of a model in the `model_args` of its config.json. `LEAN_TIMM_VIT` is the same model behind our
entry point `leansurgeon_vit`, which takes a `head_dim` (`import leansurgeon.models.timm_vit` registers it).
"""

from __future__ import annotations

from leansurgeon.architectures.base import Config, Tensor
from leansurgeon.architectures.facts import Takes
from leansurgeon.architectures.lean import lean
from leansurgeon.architectures.tensors import linear, norm
from leansurgeon.architectures.timm_models import (
    DEFAULTS,
    PATCH_SIZES,
    Built,
    TimmModels,
    is_norm,
    mlp,
    of_timm,
    plain_numbers,
    tokens,
)

HALF = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}  # how published ViTs standardise their pixels


def reads(model: Built) -> Config:
    """The constructor's arguments of a built VisionTransformer."""
    return {
        **plain_numbers(model),
        "qkv_bias": model.blocks[0].attn.qkv.bias is not None,
        "class_token": model.cls_token is not None,
        "fc_norm": is_norm(model.fc_norm),
    }


def unlike(model: Built) -> str | None:
    """The parts of a timm model that our declaration does not know, in words; None for a plain ViT."""
    from timm.layers import Mlp, PatchEmbed
    from timm.models.vision_transformer import Block, VisionTransformer
    from torch import nn

    kind = type(model).__name__
    if kind == "VisionTransformerDistilled":
        return "a distillation token (a distilled DeiT)"
    if type(model) is not VisionTransformer:
        return None
    block = model.blocks[0]
    attention = block.attn
    identity = nn.Identity()
    tests = {
        f"blocks of the kind {type(block).__name__}": type(block) is not Block,
        f"an MLP of the kind {type(block.mlp).__name__}": type(block.mlp) is not Mlp,
        f"a patch embedding of the kind {type(model.patch_embed).__name__}": type(model.patch_embed) is not PatchEmbed,
        "LayerScale": bool(list(getattr(block, "ls1", identity).parameters())),
        "query/key norms (qk_norm)": is_norm(getattr(attention, "q_norm", identity)),
        "a norm inside the attention (scale_attn_norm)": is_norm(getattr(attention, "norm", identity)),
        "a norm inside the MLP (scale_mlp_norm)": is_norm(getattr(block.mlp, "norm", identity)),
        "gated attention": getattr(attention, "gate", None) is not None,
        "register tokens": bool(getattr(model, "num_reg_tokens", 0)),
        "a position table without the class token (no_embed_class)": bool(model.no_embed_class),
        "no learned positions": model.pos_embed is None,
        "a norm before the first block (pre_norm)": is_norm(model.norm_pre),
        "no norm behind the last block": not (is_norm(model.norm) or is_norm(model.fc_norm)),
        f"'{model.global_pool}' pooling": model.global_pool not in ("token", "avg"),
        "flexible image sizes (dynamic_img_size)": bool(model.dynamic_img_size),
        "projections without bias": getattr(attention, "proj", None) is None or attention.proj.bias is None,
        f"norms of the kind {type(block.norm1).__name__}": not isinstance(block.norm1, nn.LayerNorm),
        "an activation other than GELU": not isinstance(getattr(block.mlp, "act", None), nn.GELU),
    }
    return ", ".join(words for words, is_so in tests.items() if is_so) or None


TIMM_VIT = of_timm(
    "vit",
    model_types=("vit_*", "deit_*"),
    block=(
        *norm("norm1"),
        *linear("attn.qkv", "qkv", "q+kv+kv", "width", bias="qkv_bias"),
        *linear("attn.proj", "o", "width", "q"),
        *norm("norm2"),
        *mlp("mlp"),
    ),
    outer=(
        Tensor("cls_token", "embedding", "1 1 width", when="class_token"),
        Tensor("pos_embed", "embedding", "1 tokens width"),
        *linear("patch_embed.proj", "embedding", "width", "channels patch_height patch_width"),
        *norm("norm", when="!fc_norm"),
        *norm("fc_norm", when="fc_norm"),
        *linear("head", "head", "labels", "width", when="num_classes"),
    ),
    sizes={"tokens": tokens, **PATCH_SIZES},
    defaults={**DEFAULTS, "class_token": True, "fc_norm": False},
    takes=Takes(special_tokens=lambda c: int(bool(c.get("class_token", True)))),
    timm=TimmModels("VisionTransformer", reads, "patch_embed.proj", pixels=HALF, unlike=unlike),
    plain=True,
)

LEAN_TIMM_VIT = lean(TIMM_VIT, "timm_vit.py")
