"""timm's BEiT with a free head_dim. Importing this module registers the entry point `leansurgeon_beit` with timm.

It takes the arguments of timm's Beit and `head_dim` (default: embed_dim // num_heads). timm's attention class has an
`attn_head_dim`, but its forward pass (1.0.31) fails with it, so it is rewritten here. Tensor names are timm's; without
`head_dim` the model is timm's own.
"""

import torch.nn.functional as F
from timm.models.beit import Attention, Beit, checkpoint_filter_fn
from torch import cat

from leansurgeon.models.timm_parts import HALF, FreeHeads, attend, entry_point


class DecoupledAttention(Attention):
    """Attention of inner width num_heads * attn_head_dim with a bias for every relative position.

    Maps `(batch, tokens, dim)` to the same shape.
    """

    def forward(self, x, shared_rel_pos_bias=None):
        bias = None if self.q_bias is None else cat((self.q_bias, self.k_bias, self.v_bias))
        qkv = F.linear(x, self.qkv.weight, bias).unflatten(-1, (3, self.num_heads, -1))
        places = None if self.relative_position_bias_table is None else self._get_rel_pos_bias()
        return attend(self, *qkv.permute(2, 0, 3, 1, 4).unbind(0), places)


class LeanBeit(FreeHeads, Beit):
    """Beit whose blocks have `num_heads` heads of `head_dim`, even if they do not add up to the width."""

    unknown, fades = ("use_shared_rel_pos_bias",), True

    def attention(self, width, heads, head_dim, kwargs, more):
        window = self.patch_embed.grid_size if kwargs.get("use_rel_pos_bias") else None
        return DecoupledAttention(width, num_heads=heads, window_size=window, attn_head_dim=head_dim, **more)


leansurgeon_beit = entry_point(LeanBeit, "leansurgeon_beit", checkpoint_filter_fn, **HALF)
