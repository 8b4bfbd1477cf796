"""timm's XCiT with a free head_dim. Importing this module registers the entry point `leansurgeon_xcit` with timm.

It takes the arguments of timm's Xcit and

    head_dim                       channels of a head of the cross-covariance attention (embed_dim // num_heads)
    cls_num_heads, cls_mlp_ratio   of the class-attention blocks (default: as in the other blocks)
    cls_head_dim                   width of their heads (default: embed_dim // cls_num_heads)

Tensor names are timm's; without these arguments the model is timm's own.
"""

import torch.nn.functional as F
from timm.models.xcit import Xcit, checkpoint_filter_fn
from torch import nn, ones

from leansurgeon.models.timm_parts import IMAGENET, FreeClassAttention, FusedAttention, entry_point, resize_mlp


class DecoupledXCA(FusedAttention):
    """Cross-covariance attention (El-Nouby et al., arXiv 2106.09681, section 3.2).

    Maps `(batch, tokens, dim)` to the same shape; a head attends between its channels, with scores of head_dim x
    head_dim.
    """

    def __init__(self, dim, num_heads, head_dim, **more):
        super().__init__(dim, num_heads, head_dim, **more)
        self.temperature = nn.Parameter(ones(num_heads, 1, 1))

    def forward(self, x):
        q, k, v = (y.transpose(-2, -1) for y in self.by_head(x))  # (batch, heads, head_dim, tokens)
        scores = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)) * self.temperature
        y = self.attn_drop(scores.softmax(dim=-1)) @ v
        return self.proj_drop(self.proj(y.permute(0, 3, 1, 2).flatten(2)))


class LeanXcit(FreeClassAttention, Xcit):
    """Xcit whose cross-covariance attention and class attention have separate heads and widths."""

    attention, class_blocks = DecoupledXCA, "cls_attn_blocks"

    def __init__(self, *, mlp_ratio=4.0, cls_mlp_ratio=None, **kwargs):
        super().__init__(mlp_ratio=mlp_ratio, **kwargs)
        units = int(self.embed_dim * (mlp_ratio if cls_mlp_ratio is None else cls_mlp_ratio))
        more = {"act_layer": kwargs.get("act_layer") or nn.GELU, "drop": kwargs.get("proj_drop_rate", 0.0)}
        for block in self.cls_attn_blocks:
            resize_mlp(block, self.embed_dim, units, self._init_weights, **more)


leansurgeon_xcit = entry_point(
    LeanXcit, "leansurgeon_xcit", checkpoint_filter_fn, crop_pct=1.0, first_conv="patch_embed.proj.0.0", **IMAGENET
)
