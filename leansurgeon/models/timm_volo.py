"""timm's VOLO of any shape. Importing this module registers the entry point `leansurgeon_volo` with timm.

It takes the arguments of timm's VOLO (`layers`, `num_heads`, ... as lists, one number per stage) and

    head_dim                       width of a head, one number per stage (default: embed_dims // num_heads)
    cls_num_heads, cls_mlp_ratio   of the class-attention blocks (default: as in the last stage)

Tensor names are timm's; without these arguments the model is timm's own.
"""

from math import ceil

import torch.nn.functional as F
from timm.models.volo import VOLO
from torch import nn

from leansurgeon.models.timm_parts import IMAGENET, FusedAttention, entry_point, resize_mlp


class DecoupledOutlook(nn.Module):
    """Outlook attention of inner width num_heads * head_dim (Yuan et al., arXiv 2106.13112, section 3.1).

    Maps `(batch, height, width, dim)` to the same shape. Every token predicts, for each head, how the tokens of its
    kernel x kernel neighbourhood attend to each other.
    """

    def __init__(self, dim, num_heads, head_dim, kernel=3, padding=1, stride=2, qkv_bias=False, attn_drop=0.0):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        self.kernel, self.padding, self.stride = kernel, padding, stride
        self.scale = head_dim**-0.5
        self.v = nn.Linear(dim, num_heads * head_dim, bias=qkv_bias)
        self.attn = nn.Linear(dim, kernel**4 * num_heads)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(num_heads * head_dim, dim)
        self.pool = nn.AvgPool2d(kernel_size=stride, stride=stride, ceil_mode=True)

    def forward(self, x):
        height, width, area = x.shape[1], x.shape[2], self.kernel**2
        windows = ceil(height / self.stride) * ceil(width / self.stride)
        fold = {"kernel_size": self.kernel, "padding": self.padding, "stride": self.stride}
        # (batch, heads, windows, area, head_dim)
        v = F.unfold(self.v(x).permute(0, 3, 1, 2), **fold)
        v = v.reshape(-1, self.num_heads, self.head_dim, area, windows).permute(0, 1, 4, 3, 2)
        centres = self.pool(x.permute(0, 3, 1, 2)).flatten(2).transpose(1, 2)
        scores = self.attn(centres).unflatten(-1, (self.num_heads, area, area)).transpose(1, 2) * self.scale
        y = self.attn_drop(scores.softmax(dim=-1)) @ v
        y = F.fold(y.permute(0, 1, 4, 3, 2).flatten(1, 3), output_size=(height, width), **fold)
        return self.proj(y.permute(0, 2, 3, 1))


class DecoupledAttention(FusedAttention):
    """Self-attention over a map of tokens; maps `(batch, height, width, dim)` to the same shape."""

    def forward(self, x):
        return super().forward(x.flatten(1, 2)).unflatten(1, x.shape[1:3])


class LeanVOLO(VOLO):
    """VOLO whose stages and class attention have separate heads."""

    def __init__(
        self, layers, *, num_heads, embed_dims, head_dim=None, cls_num_heads=None, cls_mlp_ratio=None, **kwargs
    ):
        head_dim = head_dim or [width // heads for width, heads in zip(embed_dims, num_heads, strict=True)]
        shapes = list(zip(embed_dims, num_heads, head_dim, strict=True))
        # One head divides every width; the real attention of such a stage is set below.
        given = [heads if heads * d == width else 1 for width, heads, d in shapes]
        super().__init__(layers, num_heads=given, embed_dims=embed_dims, **kwargs)
        more = {"qkv_bias": kwargs.get("qkv_bias", False), "attn_drop": kwargs.get("attn_drop_rate", 0.0)}
        for end, (width, heads, d) in zip(self.stage_ends, shapes, strict=True):
            for block in self.network[end] if heads * d != width else ():
                outlook = hasattr(block.attn, "unfold")
                block.attn = (DecoupledOutlook if outlook else DecoupledAttention)(width, heads, d, **more)
                block.attn.apply(self._init_weights)
        width, heads = embed_dims[-1], cls_num_heads or num_heads[-1]
        for block in self.post_network or ():
            attention = block.attn  # the size of its layers does not depend on the number of heads
            attention.num_heads, attention.head_dim, attention.scale = heads, width // heads, (width // heads) ** -0.5
            if cls_mlp_ratio is not None:
                resize_mlp(block, width, int(width * cls_mlp_ratio), self._init_weights)


leansurgeon_volo = entry_point(
    LeanVOLO,
    "leansurgeon_volo",
    crop_pct=0.96,
    first_conv="patch_embed.conv.0",
    classifier=("head", "aux_head"),
    **IMAGENET,
)
