"""Models of timm in declared families: the config of a built model, and the config.json of a folder.

Imports no timm at module level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from leansurgeon.architectures.base import Architecture, Config
from leansurgeon.architectures.foreign import library_builds
from leansurgeon.architectures.rules import pair
from leansurgeon.errors import UnsupportedModel, did_you_mean

if TYPE_CHECKING:
    from torch import nn

IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


@dataclass(frozen=True)
class DropPath:
    """How timm's models of a family apply `drop_path_rate`, if it does not grow linearly over all blocks.

    `constant`: every block has the full rate. The other fields are names of timm's classes: blocks `beside` the depth
    (class attention) have none, those that are `spared` count in the depth but have none, and two `halves` make up a
    block.
    """

    constant: bool = False
    beside: tuple[str, ...] = ()
    spared: tuple[str, ...] = ()
    halves: tuple[str, ...] = ()


@dataclass(frozen=True)
class TimmModels:
    """How a family appears in timm.

    `kind` is the class in timm, and `args` the constructor arguments that a config holds. `first_conv` and `classifier`
    are the names for timm's `pretrained_cfg`, `pixels` the usual mean and deviation of images.
    """

    kind: str
    args: tuple[str, ...]
    first_conv: str
    classifier: str = "head"
    fixed_input_size: bool = True
    pixels: Mapping[str, Sequence[float]] = field(default_factory=lambda: IMAGENET)
    drop_path: DropPath = DropPath()


def folder_config(family: Architecture, name: str, args: Config, pretrained_cfg: Config | None = None) -> Config:
    """Return the config.json for a model of `family` with the constructor arguments `args`.

    `timm.create_model("local-dir:FOLDER", pretrained=True)` can read it.
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
            **{k: list(v) if isinstance(v, tuple) else v for k, v in {**family.timm.pixels, **kept}.items()},
        },
    }


def source_config(family: Architecture, name: str, model: nn.Module, given: Config | None = None) -> Config | None:
    """Return the complete config of a timm model that was built with the arguments `given`.

    Returns None if the family's declaration does not cover the model: another class, an argument that the declaration
    does not know, or other tensors.
    """
    from leansurgeon.architectures.infer.timm_models import arguments

    if type(model).__name__ != family.timm.kind:
        return None
    taken, usual = arguments.constructor_arguments(type(model), name, given or {}), arguments.defaults(type(model))
    if any(value != usual.get(key, value) for key, value in taken.items() if key not in family.timm.args):
        return None
    config = folder_config(family, name.split(".")[0], list_arguments(family, taken), model.pretrained_cfg)
    declared = {spec.name: spec.shape for spec in family.tensors(config)}
    return config if declared == arguments.sizes(model) else None


def list_arguments(family: Architecture, taken: Config) -> Config:
    """Return the constructor arguments `taken` by a built timm model, as users write them.

    That is one number for equal sides, an integer for a whole ratio, lists where stages may differ.
    """
    from leansurgeon.architectures.infer.timm_models import arguments

    args = {key: arguments.as_lists(taken[key]) for key in family.timm.args}
    for key, value in args.items():
        if key in ("img_size", "patch_size") and isinstance(value, list) and value[0] == value[1]:
            args[key] = value[0]
        elif key.startswith("mlp_ratio") and isinstance(value, float) and value.is_integer():
            args[key] = int(value)
        elif key.endswith("fc_norm") and value is None:  # timm then decides by the pooling
            args[key] = args["global_pool"] == "avg"
    config = {"model_args": args}
    return family.with_shape(config, family.shape(config))["model_args"]


def skeleton(name: str, args: Config | None = None) -> Any:
    """Build a timm model with `args` on the meta device.

    timm 1.0.20 cannot do that for some models, which then take memory for their weights briefly. Raises
    `UnsupportedModel` for a name that timm does not have, and for arguments that it does not accept.
    """
    import timm

    from leansurgeon.architectures.infer.timm_models import arguments

    if not timm.is_model(name):
        near = did_you_mean(name, timm.list_models())
        raise UnsupportedModel(f"timm has no model named '{name}'{near}.")
    with library_builds(f"timm/{name}"):
        return arguments.build(name, args or {})
