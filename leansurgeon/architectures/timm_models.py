"""What the declarations of timm's families share: how a built model is read, the config.json of a folder, and short
forms for the tensors of common layers. No timm import at module level.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from leansurgeon.architectures.base import Architecture, Config, Tensor
from leansurgeon.architectures.timm_vit import pair
from leansurgeon.errors import UnsupportedModel

# Why heads of BEiT and EVA cannot become heads of another size.
HIDDEN_INPUT = "reads q, k and v by one matrix that is no module call, so its input is not seen"
IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


@dataclass(frozen=True)
class TimmModels:
    """`kind` is the class in timm, and `reads` gives the constructor's arguments of a built model; `first_conv` and
    `classifier` are the names that timm's `pretrained_cfg` asks for.
    """

    kind: str
    reads: Callable[[Any], Config]
    first_conv: str
    classifier: str = "head"
    fixed_input_size: bool = True


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
            **IMAGENET,
            **{k: list(v) if isinstance(v, tuple) else v for k, v in kept.items()},
        },
    }


def source_config(family: Architecture, name: str, model: Any) -> Config:
    """The complete config of a built timm model. Raises `UnsupportedModel` for parts that the declaration does not
    know.
    """
    if type(model).__name__ != family.timm.kind:
        raise UnsupportedModel(
            f"timm/{name} is of the class {type(model).__name__}, and {family.name} declares {family.timm.kind}."
        )
    config = folder_config(family, name.split(".")[0], family.timm.reads(model), model.pretrained_cfg)
    declared = {spec.name: spec.shape for spec in family.tensors(config)}
    built = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    for key in [*built, *declared]:
        if built.get(key) != declared.get(key):
            raise UnsupportedModel(
                f"timm/{name} differs from leansurgeon's declaration of {family.name} in '{key}': "
                f"{built.get(key, 'missing')} where {declared.get(key, 'nothing')} is declared.",
                "Variants need a declaration of their own; see leansurgeon/architectures/base.py.",
            )
    return config


def linear(name: str, role: str, out: str, into: str, *, bias: str | bool = True, **more: Any) -> tuple[Tensor, ...]:
    """Weight `(out, into)` and bias of a layer; `bias` may name the config key that switches it on. `into` may hold
    several words, as a convolution's weight has.
    """
    weight = Tensor(f"{name}.weight", role, f"{out} {into}", **more)
    when = {"when": bias} if isinstance(bias, str) else {}
    return (weight, Tensor(f"{name}.bias", role, out, **{**more, **when})) if bias else (weight,)


def class_attention(name: str, group: int) -> tuple[Tensor, ...]:
    """timm's ClassAttn, which surgery leaves alone unless it is asked to follow; `group` counts them from 1."""
    more = {"group": group, "bias": "qkv_bias"}
    return (
        *(t for part in "qkv" for t in linear(f"{name}.{part}", "other_attention", "cls_q", "width", **more)),
        *linear(f"{name}.proj", "other_attention", "width", "cls_q", group=group),
    )


def class_inner(config: Config) -> int:
    """Inner width of the class attention: timm's is the width, ours has heads and a head_dim of its own."""
    heads = config.get("cls_num_heads") or config["num_heads"]
    return heads * config["cls_head_dim"] if config.get("cls_head_dim") else config["embed_dim"]


def norm(name: str, axis: str = "width", role: str = "norm", **more: Any) -> tuple[Tensor, ...]:
    return (Tensor(f"{name}.weight", role, axis, **more), Tensor(f"{name}.bias", role, axis, **more))


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


# What stands around the blocks of BEiT and of EVA.
BEIT_OUTER = (
    Tensor("cls_token", "embedding", "1 1 width"),
    Tensor("pos_embed", "embedding", "1 tokens width", when="use_abs_pos_emb"),
    *linear("patch_embed.proj", "embedding", "width", "channels patch_height patch_width"),
    *norm("norm", when="!use_fc_norm"),
    *norm("fc_norm", when="use_fc_norm"),
    *linear("head", "head", "labels", "width", when="num_classes", bias="num_classes"),
)
