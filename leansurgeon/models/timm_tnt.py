"""timm's TNT with a free head_dim: importing this module registers the entry point `leansurgeon_tnt` with timm.

It takes the arguments of timm's TNT and `head_dim`, the width of an outer head (default: embed_dim // num_heads_outer);
the inner transformer stays timm's. Tensor names are timm's; without `head_dim` the model is timm's own.
"""

from timm.models.tnt import TNT, Attention, checkpoint_filter_fn
from torch import nn

from leansurgeon.models.timm_parts import HALF, entry_point


class LeanTNT(TNT):
    """TNT whose outer blocks hold `num_heads_outer` heads of `head_dim`, whether or not that makes up the width."""

    def __init__(self, *, head_dim=None, num_heads_outer=12, **kwargs):
        width, qkv_bias = kwargs.get("embed_dim", 768), kwargs.get("qkv_bias", False)
        if head_dim is None or num_heads_outer * head_dim == width:
            super().__init__(num_heads_outer=num_heads_outer, **kwargs)
            return
        # One head divides every width; the real attention is put in below.
        super().__init__(num_heads_outer=1, **kwargs)
        inner = num_heads_outer * head_dim
        for block in self.blocks:
            # timm's forward pass already holds q, k of another width than v; only the layers must be made.
            attention = Attention(
                width,
                inner,
                num_heads=num_heads_outer,
                qkv_bias=qkv_bias,
                attn_drop=kwargs.get("attn_drop_rate", 0.0),
                proj_drop=kwargs.get("proj_drop_rate", 0.0),
            )
            attention.v = nn.Linear(width, inner, bias=qkv_bias)
            attention.proj = nn.Linear(inner, width)
            attention.apply(self._init_weights)
            block.attn_out = attention


leansurgeon_tnt = entry_point(LeanTNT, "leansurgeon_tnt", checkpoint_filter_fn, first_conv="pixel_embed.proj", **HALF)
