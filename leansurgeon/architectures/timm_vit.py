"""timm's VisionTransformer (ViT, DeiT): pre-norm, fused qkv, head_dim derived from embed_dim // num_heads. No timm
import at module level.

timm keeps the numbers of a model in the `model_args` of its config.json. `LEAN_TIMM_VIT` is the same model behind our
entry point `leansurgeon_vit`, which takes a `head_dim` (`import leansurgeon.models.timm_vit` registers it).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from leansurgeon.architectures.base import Architecture, Config, Keys, Tensor, derive, exact_ratio
from leansurgeon.architectures.facts import Takes
from leansurgeon.errors import UnsupportedModel, did_you_mean


def pair(value: int | list[int] | tuple[int, int]) -> tuple[int, int]:
    """Height and width of an image or patch, which timm lets be one number."""
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def grid(config: Config) -> tuple[int, int]:
    """Rows and columns of patches."""
    (height, width), (down, right) = pair(config["img_size"]), pair(config["patch_size"])
    return height // down, width // right


def tokens(config: Config) -> int:
    """Rows of the position table: patches and the class token (which only a ViT may lack)."""
    rows, columns = grid(config)
    return rows * columns + bool(config.get("class_token", True))


# What timm's descendants of the ViT (BEiT, EVA, CaiT, Swin) have in common with it.
PATCH_SIZES = {
    "channels": "in_chans",
    "patch_height": lambda c: pair(c["patch_size"])[0],
    "patch_width": lambda c: pair(c["patch_size"])[1],
    "labels": "num_classes",
}
DEFAULTS = {"img_size": 224, "patch_size": 16, "in_chans": 3, "num_classes": 1000, "qkv_bias": True}


TIMM_VIT = Architecture(
    name="timm_vit",
    library="timm",
    model_types=("vit_*", "deit_*"),
    keys=Keys("depth", "num_heads", "embed_dim", mlp_ratio="mlp_ratio"),
    layer="blocks.{i}.",
    block=(
        Tensor("norm1.weight", "norm", "width"),
        Tensor("norm1.bias", "norm", "width"),
        Tensor("attn.qkv.weight", "qkv", "q+kv+kv width"),
        Tensor("attn.qkv.bias", "qkv", "q+kv+kv", when="qkv_bias"),
        Tensor("attn.proj.weight", "o", "width q"),
        Tensor("attn.proj.bias", "o", "width"),
        Tensor("norm2.weight", "norm", "width"),
        Tensor("norm2.bias", "norm", "width"),
        Tensor("mlp.fc1.weight", "up", "mlp width"),
        Tensor("mlp.fc1.bias", "up", "mlp"),
        Tensor("mlp.fc2.weight", "down", "width mlp"),
        Tensor("mlp.fc2.bias", "down", "width"),
    ),
    outer=(
        Tensor("cls_token", "embedding", "1 1 width", when="class_token"),
        Tensor("pos_embed", "embedding", "1 tokens width"),
        Tensor("patch_embed.proj.weight", "embedding", "width channels patch_height patch_width"),
        Tensor("patch_embed.proj.bias", "embedding", "width"),
        Tensor("norm.weight", "norm", "width", when="!fc_norm"),
        Tensor("norm.bias", "norm", "width", when="!fc_norm"),
        Tensor("fc_norm.weight", "norm", "width", when="fc_norm"),
        Tensor("fc_norm.bias", "norm", "width", when="fc_norm"),
        Tensor("head.weight", "head", "labels width", when="num_classes"),
        Tensor("head.bias", "head", "labels", when="num_classes"),
    ),
    sizes={
        "tokens": tokens,
        **PATCH_SIZES,
    },
    defaults={
        **DEFAULTS,
        "class_token": True,
        "fc_norm": False,
    },
    projection="blocks.{i}.attn.proj",
    norm="pre",
    takes=Takes(special_tokens=lambda c: int(bool(c.get("class_token", True)))),
    init_std=0.02,
    decoupled="leansurgeon_vit",
)

LEAN_TIMM_VIT = derive(
    TIMM_VIT,
    name="leansurgeon_vit",
    model_types=("leansurgeon_vit",),
    keys=replace(TIMM_VIT.keys, head_dim="head_dim"),
    decoupled=None,
    modelling="timm_vit.py",
)


def folder_config(architecture: str, args: Config, pretrained_cfg: Config | None = None) -> Config:
    """The config.json that `timm.create_model("local-dir:FOLDER", pretrained=True)` reads.

    timm takes `model_args` only from a file that has a `pretrained_cfg`, too; without one it silently builds the
    architecture's defaults.
    """
    height, width = pair(args.get("img_size", 224))
    known = {
        "input_size": [args.get("in_chans", 3), height, width],
        "fixed_input_size": True,
        "num_classes": args.get("num_classes", 1000),
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "interpolation": "bicubic",
        "crop_pct": 0.9,
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
    }
    kept = {k: v for k, v in (pretrained_cfg or {}).items() if k in ("mean", "std", "interpolation", "crop_pct")}
    return {
        "architecture": architecture,
        "num_classes": known["num_classes"],
        "num_features": args["embed_dim"],
        "model_args": dict(args),
        "pretrained_cfg": known | {k: list(v) if isinstance(v, tuple) else v for k, v in kept.items()},
    }


def source_config(name: str, model: Any = None) -> Config:
    """The complete config of a timm ViT by its name, with or without a tag (`vit_base_patch16_224.augreg_in1k`), read
    from the model itself: `model`, or one built without memory.

    Raises `UnsupportedModel` for a name that timm does not have, and for variants with parts that this declaration does
    not know.
    """
    model = skeleton(name) if model is None else model
    return folder_config(name.split(".")[0], numbers(name, model), model.pretrained_cfg)


def skeleton(name: str, args: Config | None = None) -> Any:
    """A timm model, built with `args`, on the meta device; timm 1.0.20 cannot build it so, and it costs its weights for
    a moment. Raises `UnsupportedModel` for a name that timm does not have, and arguments that it does not take.
    """
    import timm
    import torch

    if not timm.is_model(name):
        near = did_you_mean(name, timm.list_models())
        raise UnsupportedModel(f"timm has no model named '{name}'{near}.")
    try:
        with torch.device("meta"):
            return timm.create_model(name, **(args or {}))
    except (RuntimeError, NotImplementedError):
        return timm.create_model(name, **(args or {}))
    except TypeError as error:
        if not args:
            raise
        raise UnsupportedModel(f"timm cannot build {name} with the model_args of config.json: {error}.") from None


def plain_numbers(model: Any) -> Config:
    """The constructor's arguments that every descendant of the ViT has, read from a built model."""
    embed = model.patch_embed
    return {
        "img_size": square(embed.img_size),
        "patch_size": square(embed.patch_size),
        "in_chans": embed.proj.in_channels,
        "num_classes": model.num_classes,
        "global_pool": model.global_pool,
        "embed_dim": model.embed_dim,
        "depth": len(model.blocks),
        "num_heads": model.blocks[0].attn.num_heads,
        "mlp_ratio": exact_ratio(model.blocks[0].mlp.fc2.in_features, model.embed_dim),
    }


def numbers(name: str, model: Any) -> Config:
    """`model_args` of a built VisionTransformer."""
    problem = what_is_not_supported(model)
    if problem:
        raise UnsupportedModel(
            f"timm/{name} has {problem}, which leansurgeon's declaration of timm's ViT does not know.",
            "Supported: plain ViT and DeiT, such as timm/vit_base_patch16_224 and timm/deit_small_patch16_224.",
        )
    return {
        **plain_numbers(model),
        "qkv_bias": model.blocks[0].attn.qkv.bias is not None,
        "class_token": model.cls_token is not None,
        "fc_norm": is_norm(model.fc_norm),
    }


def square(size: tuple[int, int]) -> int | list[int]:
    """One number where both sides agree, as users write it."""
    return size[0] if size[0] == size[1] else list(size)


def is_norm(module: Any) -> bool:
    return bool(list(module.parameters()))


def what_is_not_supported(model: Any) -> str | None:
    """The parts of a timm model that our declaration does not know, in words; None for a plain ViT."""
    from timm.layers import Mlp, PatchEmbed
    from timm.models.vision_transformer import Block, VisionTransformer
    from torch import nn

    kind = type(model).__name__
    if kind == "VisionTransformerDistilled":
        return "a distillation token (a distilled DeiT)"
    if type(model) is not VisionTransformer:
        return f"the class {kind}"
    block = model.blocks[0]
    attention = block.attn
    identity = nn.Identity()
    tests = {
        f"blocks of the kind {type(block).__name__}": type(block) is not Block,
        f"an MLP of the kind {type(block.mlp).__name__}": type(block.mlp) is not Mlp,
        f"a patch embedding of the kind {type(model.patch_embed).__name__}": type(model.patch_embed) is not PatchEmbed,
        "LayerScale": bool(list(getattr(block, "ls1", identity).parameters())),
        "query/key norms (qk_norm)": is_norm(getattr(attention, "q_norm", identity)),
        "a norm inside the attention (scale_attn_norm)": is_norm(getattr(attention, "norm", identity)),
        "a norm inside the MLP (scale_mlp_norm)": is_norm(getattr(block.mlp, "norm", identity)),
        "gated attention": getattr(attention, "gate", None) is not None,
        "register tokens": bool(getattr(model, "num_reg_tokens", 0)),
        "a position table without the class token (no_embed_class)": bool(model.no_embed_class),
        "no learned positions": model.pos_embed is None,
        "a norm before the first block (pre_norm)": is_norm(model.norm_pre),
        "no norm behind the last block": not (is_norm(model.norm) or is_norm(model.fc_norm)),
        f"'{model.global_pool}' pooling": model.global_pool not in ("token", "avg"),
        "flexible image sizes (dynamic_img_size)": bool(model.dynamic_img_size),
        "projections without bias": getattr(attention, "proj", None) is None or attention.proj.bias is None,
        f"norms of the kind {type(block.norm1).__name__}": not isinstance(block.norm1, nn.LayerNorm),
        "an activation other than GELU": not isinstance(getattr(block.mlp, "act", None), nn.GELU),
    }
    return ", ".join(words for words, found in tests.items() if found) or None
