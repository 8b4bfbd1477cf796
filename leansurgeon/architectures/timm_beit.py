"""timm's BEiT and BEiT v2: a ViT with a table of relative positions in every block, one column a head, and biases on
queries and values only.
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
    grid,
    is_norm,
    mlp,
    of_timm,
    plain_numbers,
    tokens,
)


def offsets(config: Config) -> int:
    """Rows of a table: relative positions of patches, and three for the class token."""
    rows, columns = grid(config)
    return (2 * rows - 1) * (2 * columns - 1) + 3


def reads(model: Built) -> Config:
    """The constructor's arguments of a built Beit."""
    block = model.blocks[0]
    return {
        **plain_numbers(model),
        "qkv_bias": block.attn.q_bias is not None,
        "init_values": getattr(block, "init_values", 1e-5) if block.gamma_1 is not None else None,
        "use_abs_pos_emb": model.pos_embed is not None,
        "use_rel_pos_bias": block.attn.relative_position_bias_table is not None,
        "use_fc_norm": is_norm(model.fc_norm),
    }


TIMM_BEIT = of_timm(
    "beit",
    model_types=("beit_*", "beitv2_*"),
    block=(
        Tensor("gamma_1", "norm", "width", when="init_values"),
        Tensor("gamma_2", "norm", "width", when="init_values"),
        *norm("norm1"),
        Tensor("attn.q_bias", "q", "q", when="qkv_bias"),
        Tensor("attn.v_bias", "v", "kv", when="qkv_bias"),
        Tensor("attn.relative_position_bias_table", "head_param", "offsets heads", when="use_rel_pos_bias"),
        Tensor("attn.qkv.weight", "qkv", "q+kv+kv width"),
        *linear("attn.proj", "o", "width", "q"),
        *norm("norm2"),
        *mlp("mlp"),
    ),
    outer=BEIT_OUTER,
    sizes={"tokens": tokens, "offsets": offsets, **PATCH_SIZES},
    defaults={**DEFAULTS, "init_values": None, "use_abs_pos_emb": True, "use_rel_pos_bias": False, "use_fc_norm": True},
    heads_unsplittable=HIDDEN_INPUT,
    timm=TimmModels("Beit", reads, "patch_embed.proj"),
)

LEAN_TIMM_BEIT = lean(TIMM_BEIT, "timm_beit.py")
