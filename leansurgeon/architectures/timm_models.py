"""What the declarations of timm's families share: how a built model is read, the config.json of a folder, and short
forms for the tensors of common layers. No timm import at module level.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from leansurgeon.architectures.base import Architecture, Config, Keys, Tensor, exact_ratio
from leansurgeon.architectures.foreign import library_builds
from leansurgeon.architectures.tensors import linear, norm
from leansurgeon.errors import UnsupportedModel, did_you_mean

if TYPE_CHECKING:
    from torch import nn

Built: TypeAlias = "nn.Module"  # a model that timm has built

# Why heads of BEiT and EVA cannot become heads of another size.
HIDDEN_INPUT = "reads q, k and v by one matrix that is no module call, so its input is not seen"
IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}

VARIANTS = "Variants need a declaration of their own; see leansurgeon/architectures/base.py."


@dataclass(frozen=True)
class DropPath:
    """How timm's models of a family take `drop_path_rate`, where that does not grow evenly over all blocks: `constant`
    says that every block has the whole of it. By the names of timm's classes, blocks that stand `beside` the depth
    (class attention) have none, those that are `spared` count in the depth and have none, and `halves` make up a block.
    """

    constant: bool = False
    beside: tuple[str, ...] = ()
    spared: tuple[str, ...] = ()
    halves: tuple[str, ...] = ()


@dataclass(frozen=True)
class TimmModels:
    """`kind` is the class in timm, and `reads` gives the constructor's arguments of a built model; `first_conv` and
    `classifier` are the names that timm's `pretrained_cfg` asks for, `pixels` the usual mean and deviation of images.
    `unlike` names the parts of a built model that the declaration does not know.
    """

    kind: str
    reads: Callable[[Any], Config]
    first_conv: str
    classifier: str = "head"
    fixed_input_size: bool = True
    pixels: Mapping[str, list[float]] = field(default_factory=lambda: IMAGENET)
    unlike: Callable[[Any], str | None] = lambda model: None
    drop_path: DropPath = DropPath()


def of_timm(name: str, **more: Any) -> Architecture:
    """The family of timm's models of this `name`; `more` is its tensors, and all that is not as below. Unless it says
    otherwise, its form with a head_dim of its own is `leansurgeon_NAME` (`lean`).
    """
    usual = {
        "name": f"timm_{name}",
        "library": "timm",
        "keys": Keys("depth", "num_heads", "embed_dim", mlp_ratio="mlp_ratio"),
        "layer": "blocks.{i}.",
        "projection": "blocks.{i}.attn.proj",
        "norm": "pre",
        "plain": False,
        "init_std": 0.02,
        "decoupled": f"leansurgeon_{name}",
    }
    return Architecture(**usual | more)


def pair(value: int | list[int] | tuple[int, int]) -> tuple[int, int]:
    """Height and width of an image or patch, which timm lets be one number."""
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[-1]))


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


def folder_config(family: Architecture, name: str, args: Config, pretrained_cfg: Config | None = None) -> Config:
    """The config.json that `timm.create_model("local-dir:FOLDER", pretrained=True)` reads, for a model of `family` with
    the constructor's arguments `args`.
    """
    given = pretrained_cfg or {}
    height, width = pair(args["img_size"] if "img_size" in args else tuple(given.get("input_size", (3, 224, 224)))[1:])
    kept = {k: given[k] for k in ("mean", "std", "interpolation", "crop_pct") if k in given}
    return {
        "architecture": name,
        "num_classes": args.get("num_classes", 1000),
        "num_features": family.shape({"model_args": dict(args)}).stages[-1].width,
        "model_args": dict(args),
        "pretrained_cfg": {
            "input_size": [args.get("in_chans", 3), height, width],
            "fixed_input_size": family.timm.fixed_input_size,
            "num_classes": args.get("num_classes", 1000),
            "first_conv": family.timm.first_conv,
            "classifier": family.timm.classifier,
            "interpolation": "bicubic",
            "crop_pct": 0.9,
            **family.timm.pixels,
            **{k: list(v) if isinstance(v, tuple) else v for k, v in kept.items()},
        },
    }


def source_config(family: Architecture, name: str, model: Built) -> Config:
    """The complete config of a built timm model. Raises `UnsupportedModel` for parts that the declaration does not
    know.
    """
    kind = type(model).__name__
    try:
        strange = family.timm.unlike(model)
    except AttributeError as error:  # other blocks (parallel ones have no `attn`) lack what a plain one has
        strange = f"blocks of the kind {type(model.blocks[0]).__name__} ({error})"
    if kind != family.timm.kind and not strange:
        raise UnsupportedModel(f"timm/{name} is of the class {kind}, and {family.name} declares {family.timm.kind}.")
    if strange:
        raise UnsupportedModel(
            f"timm/{name} has {strange}, which leansurgeon's declaration of {family.name} does not know.", VARIANTS
        )
    config = folder_config(family, name.split(".")[0], family.timm.reads(model), model.pretrained_cfg)
    declared = {spec.name: spec.shape for spec in family.tensors(config)}
    built = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    for key in [*built, *declared]:
        if built.get(key) != declared.get(key):
            raise UnsupportedModel(
                f"timm/{name} differs from leansurgeon's declaration of {family.name} in '{key}': "
                f"{built.get(key, 'missing')} where {declared.get(key, 'nothing')} is declared.",
                VARIANTS,
            )
    return config


def skeleton(name: str, args: Config | None = None) -> Any:
    """A timm model, built with `args`, on the meta device; timm 1.0.20 cannot build it so, and it costs its weights for
    a moment. Raises `UnsupportedModel` for a name that timm does not have, and arguments that it does not take.
    """
    import timm
    import torch

    if not timm.is_model(name):
        near = did_you_mean(name, timm.list_models())
        raise UnsupportedModel(f"timm has no model named '{name}'{near}.")
    with library_builds(f"timm/{name}"):
        try:
            with torch.device("meta"):
                return timm.create_model(name, **(args or {}))
        except (RuntimeError, NotImplementedError):
            return timm.create_model(name, **(args or {}))


def plain_numbers(model: Built) -> Config:
    """The constructor's arguments that every descendant of the ViT has, read from a built model."""
    return {
        **image_numbers(model, model.patch_embed),
        "global_pool": model.global_pool,
        "embed_dim": model.embed_dim,
        "depth": len(model.blocks),
        "num_heads": model.blocks[0].attn.num_heads,
        "mlp_ratio": exact_ratio(model.blocks[0].mlp.fc2.in_features, model.embed_dim),
    }


def image_numbers(model: Built, embed: Built) -> Config:
    """Arguments of the images and classes of a built model, whose patches `embed` makes."""
    return {
        "img_size": square(embed.img_size),
        "patch_size": square(embed.patch_size),
        "in_chans": embed.proj.in_channels,
        "num_classes": model.num_classes,
    }


def square(size: tuple[int, int]) -> int | list[int]:
    """One number where both sides agree, as users write it."""
    return size[0] if size[0] == size[1] else list(size)


def is_norm(module: Built) -> bool:
    """Whether a place for a norm holds one; timm puts an identity where there is none."""
    return bool(list(module.parameters()))


def keeping_class_attention(**rules: Callable[[Config], Any]) -> Callable[[Config], Config]:
    """How a config becomes one of ours in which the class attention stays as it is: what the `rules` make of timm's
    arguments stands in arguments of its own.
    """

    def adopt(config: Config) -> Config:
        args = config["model_args"]
        for key, rule in rules.items():
            args.setdefault(key, rule(args))
        return config

    return adopt


def class_inner(config: Config) -> int:
    """Inner width of the class attention: timm's is the width, ours has heads and a head_dim of its own."""
    heads = config.get("cls_num_heads") or config["num_heads"]
    return heads * config["cls_head_dim"] if config.get("cls_head_dim") else config["embed_dim"]


def batch_norm(name: str, axis: str, role: str = "norm", **more: Any) -> tuple[Tensor, ...]:
    """A batch norm with its running statistics, which are saved but are no parameters."""
    statistics = (("running_mean", axis), ("running_var", axis), ("num_batches_tracked", ""))
    return (*norm(name, axis, role, **more), *(Tensor(f"{name}.{n}", "buffer", a, **more) for n, a in statistics))


def mlp(name: str, units: str = "mlp", width: str = "width", *, role: str | None = None, **more: Any) -> tuple:
    """timm's Mlp; `role` for one that surgery leaves alone."""
    return (
        *linear(f"{name}.fc1", role or "up", units, width, **more),
        *linear(f"{name}.fc2", role or "down", width, units, **more),
    )


def class_block(name: str, attention: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A block around this class attention, which surgery leaves alone."""
    return (*norm(f"{name}norm1"), *attention, *norm(f"{name}norm2"), *mlp(f"{name}mlp", "cls_mlp", role="other_mlp"))


def class_blocks(name: str, gamma: str) -> tuple[Tensor, ...]:
    """The two blocks of timm's ClassAttn with layer scales that are called `gamma`. Surgery leaves them alone unless it
    is asked to follow; `group` counts the attentions from 1.
    """
    tensors: tuple[Tensor, ...] = ()
    for group in (1, 2):
        at, more = f"{name}.{group - 1}.", {"group": group, "bias": "qkv_bias"}
        attention = (
            *(t for part in "qkv" for t in linear(f"{at}attn.{part}", "other_attention", "cls_q", "width", **more)),
            *linear(f"{at}attn.proj", "other_attention", "width", "cls_q", group=group),
        )
        tensors += (*(Tensor(f"{at}{gamma}{i}", "norm", "width") for i in (1, 2)), *class_block(at, attention))
    return tensors


# What stands around the blocks of BEiT and of EVA.
BEIT_OUTER = (
    Tensor("cls_token", "embedding", "1 1 width"),
    Tensor("pos_embed", "embedding", "1 tokens width", when="use_abs_pos_emb"),
    *linear("patch_embed.proj", "embedding", "width", "channels patch_height patch_width"),
    *norm("norm", when="!use_fc_norm"),
    *norm("fc_norm", when="use_fc_norm"),
    *linear("head", "head", "labels", "width", when="num_classes"),
)
