"""Tiny forms of the presets, and a cut of a folder without its proof."""

from __future__ import annotations

from leansurgeon.checkpoints.source import open_source
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.shrink import DecidedCut, carry_out

TINY = dict(num_hidden_layers=2, num_attention_heads=4, hidden_size=32, intermediate_size=48, head_dim=8)
IMAGES = dict(depth=2, num_heads=4, embed_dim=32, mlp_ratio=2, img_size=8, patch_size=4, in_chans=1, num_classes=5)
STAGES = dict(in_chans=3, num_classes=5)
SMALL = STAGES | dict(img_size=32)
# Presets of the models that are our own, or timm's, at a tiny size.
OURS = {
    "bert-crammed": TINY | dict(vocab_size=61),
    "gpt2-tinystories": TINY | dict(vocab_size=61, max_position_embeddings=40),
    "lra/listops": TINY | dict(max_position_embeddings=64, num_landmarks=4),
    "vit-b": IMAGES,
    "xcit-m": SMALL | dict(embed_dim=32, depth=2, num_heads=4),
    "tnt-b": SMALL | dict(embed_dim=32, inner_dim=8, depth=2, num_heads_outer=4),
    "davit-b": STAGES | dict(depths=[1, 2, 3, 1], embed_dims=[16, 32, 32, 32], num_heads=[2, 4, 4, 4]),
    "volo-d3": SMALL
    | dict(stem_hidden_dim=8, layers=[2, 3, 4, 2], embed_dims=[16, 32, 32, 32], num_heads=[2, 4, 4, 4]),
}


def cut(folder, out, **wanted):
    source = open_source(str(folder))
    carry_out(
        DecidedCut(plan(source, RequestedShape(**{"init": "fresh-attention"} | wanted), seed=0)), out, check=False
    )
    return out
