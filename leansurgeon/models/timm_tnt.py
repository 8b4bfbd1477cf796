"""timm's TNT with a free head_dim: importing this module registers the entry point `leansurgeon_tnt` with timm.

It takes the arguments of timm's TNT and `head_dim`, the width of an outer head (default: embed_dim // num_heads_outer);
the inner transformer stays timm's. Tensor names are timm's; without `head_dim` the model is timm's own.
"""

from timm.models.tnt import TNT, Attention, checkpoint_filter_fn
from torch import nn

from leansurgeon.models.timm_parts import HALF, FreeHeads, entry_point


class LeanTNT(FreeHeads, TNT):
    """TNT whose outer blocks hold `num_heads_outer` heads of `head_dim`, whether or not that makes up the width."""

    heads, place, qkv_bias = "num_heads_outer", "attn_out", False

    def attention(self, width, heads, head_dim, kwargs, more):
        """timm's forward pass already holds q, k of another width than v; only the layers must be made."""
        inner = heads * head_dim
        attention = Attention(width, inner, num_heads=heads, **more)
        attention.v = nn.Linear(width, inner, bias=more["qkv_bias"])
        attention.proj = nn.Linear(inner, width)
        return attention


leansurgeon_tnt = entry_point(LeanTNT, "leansurgeon_tnt", checkpoint_filter_fn, first_conv="pixel_embed.proj", **HALF)
