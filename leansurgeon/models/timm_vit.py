"""timm's VisionTransformer with a free head_dim.

Importing this module registers the entry point `leansurgeon_vit` with timm.
`timm.create_model("local-dir:FOLDER", pretrained=True)` then builds a folder whose config.json says `{"architecture":
"leansurgeon_vit", "model_args": {"embed_dim": 768, "depth": 7, "num_heads": 16, "head_dim": 64, ...}, ...}`. Tensor
names are timm's; with `head_dim=None` the model is timm's own.
"""

from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn

from leansurgeon.models.timm_parts import HALF, FreeHeads, FusedAttention, entry_point


class LeanVisionTransformer(FreeHeads, VisionTransformer):
    """VisionTransformer whose blocks have `num_heads` heads of `head_dim`, even if they do not add up to the width."""

    unknown = ("qk_norm", "scale_attn_norm", "fix_init", "attn_layer", "block_fn")

    def attention(self, width, heads, head_dim, kwargs, more):
        """Return our attention: older versions of timm have no argument for a free width."""
        return FusedAttention(width, heads, head_dim, proj_bias=kwargs.get("proj_bias", True), **more)


leansurgeon_vit = entry_point(LeanVisionTransformer, "leansurgeon_vit", checkpoint_filter_fn, **HALF)
