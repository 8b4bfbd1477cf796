"""timm's TNT with a free head_dim. Importing this module registers the entry point `leansurgeon_tnt` with timm.

It takes the arguments of timm's TNT and `head_dim`, the width of an outer head (default: embed_dim // num_heads_outer);
the inner transformer is timm's. Tensor names are timm's; without `head_dim` the model is timm's own.
"""

from timm.models.tnt import TNT, Attention, checkpoint_filter_fn
from torch import nn

from leansurgeon.models.timm_parts import HALF, FreeHeads, entry_point


class LeanTNT(FreeHeads, TNT):
    """TNT whose outer blocks have `num_heads_outer` heads of `head_dim`, even if they do not add up to the width."""

    heads, place, qkv_bias = "num_heads_outer", "attn_out", False

    def attention(self, width, heads, head_dim, kwargs, more):
        """Return timm's attention with new layers: its forward pass already allows q and k of another width than v."""
        inner = heads * head_dim
        attention = Attention(width, inner, num_heads=heads, **more)
        attention.v = nn.Linear(width, inner, bias=more["qkv_bias"])
        attention.proj = nn.Linear(inner, width)
        return attention


leansurgeon_tnt = entry_point(LeanTNT, "leansurgeon_tnt", checkpoint_filter_fn, first_conv="pixel_embed.proj", **HALF)
