"""Shared parts of our forms of timm's models: registration of entry points, and attention of any width.

These modules never travel with a checkpoint, so they may import each other, but nothing else of leansurgeon.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import sqrt
from typing import Any, NoReturn

import torch.nn.functional as F
from timm.layers import Mlp
from timm.models import build_model_with_cfg, register_model
from torch import Tensor, nn, no_grad

HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
CLIP = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}
GETTER = {"out_indices": 3, "feature_cls": "getter"}  # how timm takes features from blocks of an isotropic model


def entry_point(
    kind: type[nn.Module],
    name: str,
    filter_fn: Callable | None = None,
    features: dict[str, Any] = GETTER,
    **settings: Any,
) -> Callable[..., nn.Module]:
    """Register `name` with timm, in the module of `kind`; it builds a `kind` from its constructor's arguments.

    `filter_fn` is timm's reader of published weights, `features` says how feature maps are taken, and `settings` are
    differences from the `pretrained_cfg` of a ViT of 224 pixels.
    """
    usual = {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "fixed_input_size": True,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
    }

    def build(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        given = features | {key: kwargs.pop(key) for key in ("out_indices",) if key in kwargs}
        return build_model_with_cfg(kind, name, pretrained, pretrained_filter_fn=filter_fn, feature_cfg=given, **kwargs)

    # timm looks up an entry point's settings in its `__module__`.
    build.__name__ = build.__qualname__ = name
    build.__module__ = kind.__module__
    build.__doc__ = kind.__doc__
    sys.modules[kind.__module__].default_cfgs = {name: usual | settings}
    return register_model(build)


class FusedAttention(nn.Module):
    """Multi-head self-attention of inner width num_heads * head_dim, with q, k and v in one matrix as in timm.

    Maps `(batch, tokens, dim)` to the same shape; weights are `qkv (3 * inner, dim)` and `proj (dim, inner)`.
    """

    maps: tuple[tuple[str, int], ...] = (("qkv", 3),)  # matrices that read the tokens, with their rows in inner widths

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        proj_bias: bool = True,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        self.scale = head_dim**-0.5
        for name, count in self.maps:
            setattr(self, name, nn.Linear(dim, count * num_heads * head_dim, bias=qkv_bias))
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(num_heads * head_dim, dim, bias=proj_bias)
        self.proj_drop = nn.Dropout(proj_drop)

    def by_head(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return q, k, v, each `(batch, heads, tokens, head_dim)`."""
        return self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return attend(self, *self.by_head(x), attn_mask, is_causal)


def attend(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """Apply attention to q, k, v `(batch, heads, tokens, head_dim)`, then the module's dropouts and projection."""
    dropout = module.attn_drop.p if module.training else 0.0
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout, is_causal=is_causal)
    return module.proj_drop(module.proj(y.transpose(1, 2).flatten(2)))


class ClassAttention(FusedAttention):
    """Class attention of inner width num_heads * head_dim: only the first token attends.

    Touvron et al., arXiv 2103.17239, section 3.2. Maps `(batch, tokens, dim)` to `(batch, 1, dim)`.
    """

    maps = (("q", 1), ("k", 1), ("v", 1))

    def forward(self, x: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

        q, k, v = heads(self.q(x[:, :1])), heads(self.k(x)), heads(self.v(x))
        weights = self.attn_drop((q * self.scale @ k.transpose(-2, -1)).softmax(dim=-1))
        return self.proj_drop(self.proj((weights @ v).transpose(1, 2).flatten(2)))


def of_attention(kwargs: dict[str, Any], qkv_bias: bool = True) -> dict[str, Any]:
    """Return the arguments of an attention from those of its model."""
    drop = {name: kwargs.get(f"{name}_rate", 0.0) for name in ("attn_drop", "proj_drop")}
    return {"qkv_bias": kwargs.get("qkv_bias", qkv_bias), **drop}


def resize_mlp(block: nn.Module, width: int, units: int, start: Callable[[nn.Module], None], **more: Any) -> None:
    """Give a block an MLP with this many units if it has another; `start` initialises its weights."""
    if block.mlp.fc1.out_features != units:
        block.mlp = Mlp(in_features=width, hidden_features=units, **more)
        block.mlp.apply(start)


class FreeHeads:
    """Mixin placed before a class of timm: `head_dim` is free, so heads need not add up to the width.

    Without a head_dim, or if they do add up, the model is timm's own.
    """

    heads = "num_heads"  # argument for the number of heads
    place = "attn"  # attribute of a block that holds the attention
    unknown: tuple[str, ...] = ()  # arguments that the attention with a free head_dim does not support
    qkv_bias = True  # timm's default
    fades = False  # whether deeper layers start with smaller outputs

    def __init__(self, *, head_dim: int | None = None, **kwargs: Any) -> None:
        heads, width = kwargs.setdefault(self.heads, 12), kwargs.get("embed_dim", 768)
        if head_dim is None or heads * head_dim == width:
            super().__init__(**kwargs)
            return
        if unsupported := [name for name in self.unknown if kwargs.get(name)]:
            self.refuse("does not know " + ", ".join(unsupported))
        super().__init__(**kwargs | {self.heads: self.fitting_heads(width, head_dim, kwargs)})
        for number, block in enumerate(self.blocks, 1):
            attention = self.attention(width, heads, head_dim, kwargs, of_attention(kwargs, self.qkv_bias))
            attention.apply(self._init_weights)
            if self.fades:
                with no_grad():
                    attention.proj.weight.div_(sqrt(2.0 * number))
            setattr(block, self.place, attention)

    def fitting_heads(self, width: int, head_dim: int, kwargs: dict[str, Any]) -> int:
        """Return the heads for timm's constructor, whose attention is replaced: one divides every width.

        Subclasses may raise `ValueError`.
        """
        return 1

    def attention(
        self, width: int, heads: int, head_dim: int, kwargs: dict[str, Any], more: dict[str, Any]
    ) -> nn.Module:
        """Return a block's attention for the arguments of the model; `more` comes from `of_attention`."""
        return FusedAttention(width, heads, head_dim, **more)

    def refuse(self, why: str) -> NoReturn:
        name = type(self).__module__.rpartition("timm_")[2]
        raise ValueError(f"leansurgeon_{name} with a free head_dim {why}.")


class FreeClassAttention:
    """Mixin placed before a class of timm with class attention: both kinds of block have their own heads.

    Blocks have `num_heads` heads of `head_dim` in our `attention`; `class_blocks` have their own numbers.
    """

    attention: type[FusedAttention]
    class_blocks: str

    def __init__(
        self,
        *,
        num_heads: int = 12,
        head_dim: int | None = None,
        cls_num_heads: int | None = None,
        cls_head_dim: int | None = None,
        **kwargs: Any,
    ) -> None:
        width = kwargs.get("embed_dim", 768)
        cls_num_heads = cls_num_heads or num_heads
        # timm's constructor requires heads that divide the width; otherwise the class attention is rebuilt.
        native = cls_head_dim in (None, width // cls_num_heads) and width % cls_num_heads == 0
        super().__init__(num_heads=cls_num_heads if native else 1, **kwargs)
        more = of_attention(kwargs)
        if not native or num_heads != cls_num_heads or head_dim not in (None, width // num_heads):
            for block in self.blocks:
                block.attn = self.attention(width, num_heads, head_dim or width // num_heads, **more)
                block.attn.apply(self._init_weights)
        for block in () if native else getattr(self, self.class_blocks):
            block.attn = ClassAttention(width, cls_num_heads, cls_head_dim or width // cls_num_heads, **more)
            block.attn.apply(self._init_weights)
