"""timm's BEiT with a free head_dim: importing this module registers the entry point `leansurgeon_beit` with timm.

It takes the arguments of timm's Beit and `head_dim` (default: embed_dim // num_heads). timm's attention class takes an
`attn_head_dim`, and its forward pass (1.0.31) fails with one, so it is written anew here. Tensor names are timm's;
without `head_dim` the model is timm's own.
"""

from math import sqrt

import torch.nn.functional as F
from timm.models.beit import Attention, Beit, checkpoint_filter_fn
from torch import cat, no_grad

from leansurgeon.models.timm_parts import HALF, attend, entry_point


class DecoupledAttention(Attention):
    """Attention of inner width num_heads * attn_head_dim with a bias for every relative position.

    `(batch, tokens, dim)` -> the same.
    """

    def forward(self, x, shared_rel_pos_bias=None):
        bias = None if self.q_bias is None else cat((self.q_bias, self.k_bias, self.v_bias))
        qkv = F.linear(x, self.qkv.weight, bias).unflatten(-1, (3, self.num_heads, -1))
        places = None if self.relative_position_bias_table is None else self._get_rel_pos_bias()
        return attend(self, *qkv.permute(2, 0, 3, 1, 4).unbind(0), places)


class LeanBeit(Beit):
    """Beit whose blocks hold `num_heads` heads of `head_dim`, whether or not that makes up the width."""

    def __init__(self, *, head_dim=None, num_heads=12, **kwargs):
        width = kwargs.get("embed_dim", 768)
        if head_dim is None or num_heads * head_dim == width:
            super().__init__(num_heads=num_heads, **kwargs)
            return
        if kwargs.get("use_shared_rel_pos_bias"):
            raise ValueError("leansurgeon_beit with a free head_dim does not know use_shared_rel_pos_bias.")
        # One head divides every width; the real attention is put in below.
        super().__init__(num_heads=1, **kwargs)
        for number, block in enumerate(self.blocks, 1):
            block.attn = DecoupledAttention(
                width,
                num_heads=num_heads,
                qkv_bias=kwargs.get("qkv_bias", True),
                attn_drop=kwargs.get("attn_drop_rate", 0.0),
                proj_drop=kwargs.get("proj_drop_rate", 0.0),
                window_size=self.patch_embed.grid_size if kwargs.get("use_rel_pos_bias") else None,
                attn_head_dim=head_dim,
            )
            block.attn.apply(self._init_weights)
            with no_grad():  # BEiT starts deeper layers with smaller outputs
                block.attn.proj.weight.div_(sqrt(2.0 * number))


leansurgeon_beit = entry_point(LeanBeit, "leansurgeon_beit", checkpoint_filter_fn, **HALF)
