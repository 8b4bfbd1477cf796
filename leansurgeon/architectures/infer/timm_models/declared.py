"""A family of timm as a declaration, and the config.json of its models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from leansurgeon.architectures.base import Architecture
from leansurgeon.architectures.infer import bind
from leansurgeon.architectures.infer.library import Unbuildable
from leansurgeon.architectures.infer.timm_models import arguments
from leansurgeon.architectures.infer.timm_models.library import TimmLibrary
from leansurgeon.architectures.infer.timm_models.search import GENERAL, explore
from leansurgeon.architectures.infer.tiny import WIDTHS
from leansurgeon.architectures.infer.widened import head_dims, with_head_dims
from leansurgeon.architectures.tensors import Config, write_key
from leansurgeon.errors import UnsupportedModel
from leansurgeon.models.timm_any import as_lists

LEAN = "leansurgeon_any"
MARK = "leansurgeon"  # config.json key that marks a model without a matching hand-written declaration


def architecture(config: Mapping[str, Any]) -> Architecture:
    """Return the inferred declaration for a timm config with complete arguments. Raises `UnsupportedModel`."""
    name = config["architecture"]
    flat = {"model_type": name} | arguments.flatten(config.get("model_args") or {})  # the form that inference uses
    finding = explore(flat)
    if finding.trouble or not finding.stages:
        raise UnsupportedModel(
            f"timm/{name} ({finding.cls}) has no declaration, and none could be inferred: {finding.trouble}."
        )
    stages = []
    for stage in finding.stages:  # the argument that holds its width, if one holds it for this stage alone
        places = stage.depth_key.split(".")[1:]
        keys = [k for k in flat if GENERAL.get(arguments.base(k)) == WIDTHS[0] and k.split(".")[1:] == places]
        alone = len(keys) == 1 and arguments.base(keys[0]) != "base_dims"
        stages.append(replace(stage, width_key=keys[0] if alone else ""))
    finding = replace(finding, stages=tuple(stages))
    try:
        made = bind.declaration(finding, flat, TimmLibrary.of(flat))
    except Unbuildable as error:
        raise UnsupportedModel(f"timm does not build this {name}: {error}") from error
    return replace(
        made,
        library="timm",
        init_std=0.02,
        forget=(),
        index_lists=tuple(k for k in arguments.INDEX_LISTS if k in flat and len(finding.stages) == 1),
        decoupled=LEAN if made.decoupled else None,
    )


def complete_config(name: str, given: Config) -> Config:
    """Return the config.json of a timm model with these arguments in addition to those of its name.

    Raises the errors of timm.
    """
    args = arguments.numbers_of(name, given)
    model = arguments.build(name, args)
    said = model.pretrained_cfg
    side = args.get("img_size", list(said["input_size"])[1:])
    height, width = (side, side) if isinstance(side, int) else side
    kept = ("mean", "std", "interpolation", "crop_pct", "first_conv", "classifier", "fixed_input_size")
    labels = getattr(model, "num_classes", args.get("num_classes", 1000))
    return {
        "architecture": name,
        "num_classes": labels,
        "num_features": getattr(model, "num_features", 0),
        "model_args": args | {"num_classes": labels},
        MARK: {"family": "inferred"},
        "pretrained_cfg": {
            "input_size": [args.get("in_chans", 3), height, width],
            "num_classes": labels,
            **{key: as_lists(said[key]) for key in kept if key in said},
        },
    }


def lean(base: Architecture) -> Architecture:
    """Return the form of an inferred timm family that supports any number of heads, by our entry point."""
    specs = [spec for spec in base.evidence["decoupled"]["stages"] if spec]

    def adopt(config: Config) -> Config:
        args, name = dict(config["model_args"]), base.model_types[0]
        flat = arguments.flatten(args)
        spec = {"base": name, "native": {s["heads"]: flat[s["heads"]] for s in specs}, "stages": specs}
        return config | {"architecture": LEAN, "model_args": args | head_dims(base, config) | {"lean": spec}}

    return with_head_dims(base, LEAN, "timm_any.py", adopt)


def native(config: Mapping[str, Any]) -> Config:
    """Return the config of timm's own model for a config of ours."""
    args = dict(config["model_args"])
    spec = args.pop("lean")
    for stage in spec["stages"]:
        args.pop(stage["head_dim"], None)
    for key, heads in spec["native"].items():
        write_key(args, key, heads)
    return dict(config) | {"architecture": spec["base"], "model_args": args}
