"""timm's EVA with a free head_dim. Importing this module registers the entry point `leansurgeon_eva` with timm.

It takes the arguments of timm's Eva and `head_dim`, a divisor of embed_dim (default: embed_dim // num_heads), to which
rotary positions are fitted. timm's attention class has an `attn_head_dim`, but its forward pass (1.0.31) fails with it,
so it is rewritten here. Tensor names are timm's; without `head_dim` the model is timm's own.
"""

from typing import Any

import torch.nn.functional as F
from timm.layers import apply_rot_embed_cat
from timm.models.eva import Eva, EvaAttention, checkpoint_filter_fn
from torch import Tensor, cat

from leansurgeon.models.timm_parts import CLIP, FreeHeads, entry_point


class LeanEvaAttention(EvaAttention):
    """EVA's attention with a free inner width; the class token is not rotated.

    timm 1.0.31 gives the output the shape of the input, which requires the inner width to be the width. Maps `(batch,
    tokens, dim)` to the same shape.
    """

    def forward(self, x: Tensor, rope: Tensor | None = None, attn_mask: Any = None, is_causal: bool = False) -> Tensor:
        q, k, v = (self.by_head(y) for y in self.queries_keys_values(x))
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = self.rotated(q, rope).type_as(v), self.rotated(k, rope).type_as(v)
        dropout = self.attn_drop.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout, is_causal=is_causal)
        y = self.norm(y.transpose(1, 2).flatten(2))
        if getattr(self, "gate", None) is not None:
            y = y * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(y))

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.qkv is None:
            return self.q_proj(x), self.k_proj(x), self.v_proj(x)
        qkv = self.qkv(x)
        if self.q_bias is not None:
            qkv = qkv + cat((self.q_bias, self.k_bias, self.v_bias))
        return qkv.chunk(3, dim=-1)

    def by_head(self, y: Tensor) -> Tensor:
        return y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def rotated(self, x: Tensor, rope: Tensor) -> Tensor:
        first, half = self.num_prefix_tokens, getattr(self, "rotate_half", False)
        return cat((x[:, :, :first], apply_rot_embed_cat(x[:, :, first:], rope, half=half)), dim=2)


class LeanEva(FreeHeads, Eva):
    """Eva whose blocks have `num_heads` heads of `head_dim`, even if they do not add up to the width."""

    unknown = ("qk_norm", "scale_attn_inner", "rope_rotate_half", "num_kv_heads", "use_post_norm", "num_reg_tokens")
    fades = True

    def fitting_heads(self, width, head_dim, kwargs):
        """Return the heads with which timm makes the rotary positions for head_dim: width // head_dim."""
        if not kwargs.get("qkv_fused", True) or kwargs.get("attn_type", "eva") != "eva":
            self.refuse("does not know attention other than the fused one of EVA")
        if width % head_dim:
            raise ValueError(f"leansurgeon_eva needs a head_dim that divides {width}, and {head_dim} does not.")
        return width // head_dim

    def attention(self, width, heads, head_dim, kwargs, more):
        special = {"num_prefix_tokens": self.num_prefix_tokens, "scale_norm": False}
        return LeanEvaAttention(width, num_heads=heads, attn_head_dim=head_dim, **special, **more)


leansurgeon_eva = entry_point(LeanEva, "leansurgeon_eva", checkpoint_filter_fn, **CLIP)
