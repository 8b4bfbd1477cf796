"""timm's DaViT with a free head_dim. Importing this module registers the entry point `leansurgeon_davit` with timm.

It takes the arguments of timm's DaVit and

    head_dim    width of a window head and of a channel group, one number per stage (default: embed_dims // num_heads)
    mlp_ratio   may be a list, one number per stage

Tensor names are timm's; without these arguments the model is timm's own.
"""

from timm.models.davit import DaVit, checkpoint_filter_fn

from leansurgeon.models.timm_parts import IMAGENET, FusedAttention, entry_point, resize_mlp


class DecoupledChannel(FusedAttention):
    """Attention between the channels of a group, with scores of head_dim x head_dim.

    Ding et al., arXiv 2204.03645, section 3.2. Maps `(batch, tokens, dim)` to the same shape.
    """

    def forward(self, x):
        q, k, v = self.by_head(x)
        scores = (k * self.head_dim**-0.5).transpose(-1, -2) @ v
        y = scores.softmax(dim=-1) @ q.transpose(-1, -2)
        return self.proj(y.permute(0, 3, 1, 2).flatten(2))


class LeanDaVit(DaVit):
    """DaViT whose stages have `num_heads[s]` heads of `head_dim[s]`, even if they do not add up to the width."""

    def __init__(
        self,
        *,
        embed_dims=(96, 192, 384, 768),
        num_heads=(3, 6, 12, 24),
        head_dim=None,
        mlp_ratio=4.0,
        **kwargs,
    ):
        head_dim = head_dim or [width // heads for width, heads in zip(embed_dims, num_heads, strict=True)]
        ratios = mlp_ratio if isinstance(mlp_ratio, list | tuple) else [mlp_ratio] * len(embed_dims)
        shapes = list(zip(embed_dims, num_heads, head_dim, ratios, strict=True))
        if kwargs.get("channel_attn_v2") and any(heads * d != width for width, heads, d, _ in shapes):
            raise ValueError("leansurgeon_davit with a free head_dim does not know channel_attn_v2.")
        # One head divides every width; the real attention of such a stage is set below.
        given = [heads if heads * d == width else 1 for width, heads, d, _ in shapes]
        super().__init__(embed_dims=embed_dims, num_heads=given, mlp_ratio=ratios[0], **kwargs)
        for stage, (width, heads, d, ratio) in zip(self.stages, shapes, strict=True):
            for block in (half for pair in stage.blocks for half in pair):
                if heads * d != width:
                    kind = FusedAttention if hasattr(block, "window_size") else DecoupledChannel
                    block.attn = kind(width, heads, d, kwargs.get("qkv_bias", True))
                    block.attn.apply(self._init_weights)
                if block.mlp is not None:
                    resize_mlp(block, width, int(width * ratio), self._init_weights)


leansurgeon_davit = entry_point(
    LeanDaVit,
    "leansurgeon_davit",
    checkpoint_filter_fn,
    features={"flatten_sequential": True, "out_indices": (0, 1, 2, 3)},
    pool_size=(7, 7),
    crop_pct=0.95,
    first_conv="stem.conv",
    classifier="head.fc",
    fixed_input_size=False,
    **IMAGENET,
)
