"""The originals of the paper's Tables 4 and 5 among timm's hierarchical and unusual image models: their config.json, by
timm's own figures for 224 pixels and 1000 classes. No timm here; a test holds them against timm's models.
"""

from __future__ import annotations

from leansurgeon.architectures.base import Config
from leansurgeon.architectures.timm_davit import TIMM_DAVIT
from leansurgeon.architectures.timm_models import folder_config
from leansurgeon.architectures.timm_tnt import TIMM_TNT
from leansurgeon.architectures.timm_volo import TIMM_VOLO
from leansurgeon.architectures.timm_xcit import TIMM_XCIT

SIZES = {"in_chans": 3, "num_classes": 1000}


def xcit(name: str, *, width: int, heads: int) -> Config:
    """XCiT with 24 layers and patches of 16."""
    args = SIZES | {
        "img_size": 224,
        "patch_size": 16,
        "global_pool": "token",
        "embed_dim": width,
        "depth": 24,
        "num_heads": heads,
        "mlp_ratio": 4,
        "qkv_bias": True,
        "cls_attn_layers": 2,
        "use_pos_embed": True,
        "eta": 1e-5,
        "tokens_norm": True,
    }
    return folder_config(TIMM_XCIT, name, args, {"crop_pct": 1.0})


def tnt_b() -> Config:
    """TNT-B with 12 layers and patches of 16."""
    args = SIZES | {
        "img_size": 224,
        "patch_size": 16,
        "global_pool": "token",
        "embed_dim": 640,
        "inner_dim": 40,
        "depth": 12,
        "num_heads_inner": 4,
        "num_heads_outer": 10,
        "mlp_ratio": 4,
        "qkv_bias": False,
        "first_stride": 4,
        "legacy": False,
    }
    return folder_config(TIMM_TNT, "tnt_b_patch16_224", args, {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]})


def volo(name: str, *, widths: list[int], heads: list[int]) -> Config:
    """VOLO with layers 8, 8, 16, 4, MLPs of three times the width and the auxiliary head."""
    args = SIZES | {
        "img_size": 224,
        "global_pool": "token",
        "patch_size": 8,
        "stem_hidden_dim": 64,
        "layers": [8, 8, 16, 4],
        "embed_dims": widths,
        "num_heads": heads,
        "mlp_ratio": [3, 3, 3, 3],
        "qkv_bias": False,
        "use_aux_head": True,
        "pooling_scale": 2,
    }
    return folder_config(TIMM_VOLO, name, args, {"crop_pct": 0.96})


def davit(name: str, *, widths: list[int], heads: list[int]) -> Config:
    """DaViT with blocks 1, 1, 9, 1."""
    args = SIZES | {
        "depths": [1, 1, 9, 1],
        "embed_dims": widths,
        "num_heads": heads,
        "window_size": 7,
        "mlp_ratio": 4,
        "qkv_bias": True,
        "down_kernel_size": 2,
    }
    return folder_config(TIMM_DAVIT, name, args, {"crop_pct": 0.95})
