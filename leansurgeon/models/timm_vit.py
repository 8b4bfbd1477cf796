"""timm's VisionTransformer with a free head_dim: importing this module registers the entry point `leansurgeon_vit` with
timm.

`timm.create_model("local-dir:FOLDER", pretrained=True)` then builds a folder whose config.json says `{"architecture":
"leansurgeon_vit", "model_args": {"embed_dim": 768, "depth": 7, "num_heads": 16, "head_dim": 64, ...}, ...}`. Tensor
names are timm's; `head_dim` None gives timm's model itself, untouched.
"""

from timm.layers import trunc_normal_
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import nn

from leansurgeon.models.timm_parts import HALF, FusedAttention, entry_point

NOT_SUPPORTED = ("qk_norm", "scale_attn_norm", "fix_init", "attn_layer", "block_fn")


class DecoupledAttention(FusedAttention):
    """Older versions of timm cannot say a width of its own, so the forward pass is ours."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.init_weights()

    def init_weights(self):
        """timm's default for a ViT: truncated normal of 0.02, zero biases."""
        for layer in (self.qkv, self.proj):
            trunc_normal_(layer.weight, std=0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


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
