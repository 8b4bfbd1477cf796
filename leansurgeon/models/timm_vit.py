"""timm's VisionTransformer with a free head_dim: importing this module registers the entry point `leansurgeon_vit` with
timm.

`timm.create_model("local-dir:FOLDER", pretrained=True)` then builds a folder whose config.json says `{"architecture":
"leansurgeon_vit", "model_args": {"embed_dim": 768, "depth": 7, "num_heads": 16, "head_dim": 64, ...}, ...}`. Tensor
names are timm's; `head_dim` None gives timm's model itself, untouched.
"""

import torch.nn.functional as F
from timm.layers import trunc_normal_
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import nn

from leansurgeon.models.timm_parts import HALF, entry_point

NOT_SUPPORTED = ("qk_norm", "scale_attn_norm", "fix_init", "attn_layer", "block_fn")


class DecoupledAttention(nn.Module):
    """Multi-head self-attention of inner width num_heads * head_dim. Older versions of timm cannot say that, so the
    forward pass is here.

    `(batch, tokens, dim)` -> the same; weights `qkv (3 * inner, dim)`, `proj (dim, inner)` as in timm.layers.Attention.
    """

    def __init__(self, dim, num_heads, head_dim, qkv_bias=True, proj_bias=True, attn_drop=0.0, proj_drop=0.0):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        self.attn_dim = num_heads * head_dim
        self.scale = head_dim**-0.5
        self.qkv = nn.Linear(dim, 3 * self.attn_dim, bias=qkv_bias)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(self.attn_dim, dim, bias=proj_bias)
        self.proj_drop = nn.Dropout(proj_drop)
        self.init_weights()

    def init_weights(self):
        """timm's default for a ViT: truncated normal of 0.02, zero biases."""
        for layer in (self.qkv, self.proj):
            trunc_normal_(layer.weight, std=0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def forward(self, x, attn_mask=None, is_causal=False):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.attn_drop.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout, is_causal=is_causal)
        return self.proj_drop(self.proj(y.transpose(1, 2).flatten(2)))


class LeanVisionTransformer(VisionTransformer):
    """VisionTransformer whose blocks hold `num_heads` heads of `head_dim`, whether or not that makes up the width."""

    def __init__(self, *, head_dim=None, num_heads=12, **kwargs):
        width = kwargs.get("embed_dim", 768)
        if head_dim is None or num_heads * head_dim == width:
            super().__init__(num_heads=num_heads, **kwargs)
            return
        unsupported = [name for name in NOT_SUPPORTED if kwargs.get(name)]
        if unsupported:
            raise ValueError(f"leansurgeon_vit with a free head_dim does not know {', '.join(unsupported)}.")
        # One head divides every width; the real attention is put in below.
        super().__init__(num_heads=1, **kwargs)
        for block in self.blocks:
            block.attn = DecoupledAttention(
                width,
                num_heads,
                head_dim,
                qkv_bias=kwargs.get("qkv_bias", True),
                proj_bias=kwargs.get("proj_bias", True),
                attn_drop=kwargs.get("attn_drop_rate", 0.0),
                proj_drop=kwargs.get("proj_drop_rate", 0.0),
            )


leansurgeon_vit = entry_point(LeanVisionTransformer, "leansurgeon_vit", checkpoint_filter_fn, **HALF)
