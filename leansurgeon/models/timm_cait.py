"""timm's CaiT with a free head_dim. Importing this module registers the entry point `leansurgeon_cait` with timm.

It takes the arguments of timm's Cait and

    head_dim        width of a talking head (default: embed_dim // num_heads)
    cls_num_heads   heads of the class-attention blocks (default: as in the other blocks)
    cls_head_dim    width of their heads (default: embed_dim // cls_num_heads)

Tensor names are timm's; without these arguments the model is timm's own.
"""

from timm.models.cait import Cait, checkpoint_filter_fn
from torch import nn

from leansurgeon.models.timm_parts import IMAGENET, FreeClassAttention, FusedAttention, entry_point


class DecoupledTalkingHeads(FusedAttention):
    """Talking-heads attention (Shazeer et al., arXiv 2003.02436): heads mix linearly before and after the softmax.

    Maps `(batch, tokens, dim)` to the same shape.
    """

    def __init__(self, dim, num_heads, head_dim, **more):
        super().__init__(dim, num_heads, head_dim, **more)
        self.proj_l = nn.Linear(num_heads, num_heads)
        self.proj_w = nn.Linear(num_heads, num_heads)

    def forward(self, x):
        q, k, v = self.by_head(x)
        scores = (q * self.scale) @ k.transpose(-2, -1)  # (batch, heads, tokens, tokens)
        weights = self.proj_l(scores.movedim(1, -1)).movedim(-1, 1).softmax(dim=-1)
        weights = self.attn_drop(self.proj_w(weights.movedim(1, -1)).movedim(-1, 1))
        return self.proj_drop(self.proj((weights @ v).transpose(1, 2).flatten(2)))


class LeanCait(FreeClassAttention, Cait):
    """Cait whose talking-heads attention and class attention have separate heads."""

    attention, class_blocks = DecoupledTalkingHeads, "blocks_token_only"


leansurgeon_cait = entry_point(
    LeanCait, "leansurgeon_cait", checkpoint_filter_fn, input_size=(3, 384, 384), crop_pct=1.0, **IMAGENET
)
