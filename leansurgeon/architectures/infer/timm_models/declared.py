"""A family of timm: its small random models, their exploration, its declaration, and the config.json of its models."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from leansurgeon.architectures.base import Architecture
from leansurgeon.architectures.infer import bind
from leansurgeon.architectures.infer.differences import Level, first_that_runs, numbers
from leansurgeon.architectures.infer.explore import Search, announce
from leansurgeon.architectures.infer.finding import Finding, Stage
from leansurgeon.architectures.infer.library import (
    UNBUILT,
    UNLOADED,
    Library,
    Unbuildable,
    perturb,
    quietly,
    raising,
)
from leansurgeon.architectures.infer.timm_models import arguments
from leansurgeon.architectures.infer.tiny import HEADS, WIDTHS, Config, is_number
from leansurgeon.architectures.infer.widened import head_dims, with_head_dims
from leansurgeon.architectures.tensors import write_key
from leansurgeon.errors import UnsupportedModel
from leansurgeon.models.timm_any import as_lists
from leansurgeon.shape import Stage as Numbers

LEAN = "leansurgeon_any"
MARK = "leansurgeon"  # config.json key that marks a model without a matching hand-written declaration
BATCH = 2
FAR = 9
GENERAL = {
    **dict.fromkeys(arguments.HEADS, HEADS[0]),
    **dict.fromkeys(arguments.WIDTHS, WIDTHS[0]),
    **dict.fromkeys(arguments.RATIOS, "mlp_ratio"),
}


@dataclass(frozen=True)
class TimmLibrary(Library):
    """One entry point of timm.

    Configs are flat (`arguments.flatten`), with the entry point as `model_type`. `side` is the size of the square test
    images, and `extra` holds arguments of the entry point besides the numbers.
    """

    name: str = ""
    side: int = 224
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config) -> TimmLibrary:
        """Create the library for a flat config."""
        name = config["model_type"]
        return cls(type(arguments.build(name, args_of(config))), name=name)

    def build(self, config: Config, seed: int | None = 0, device: str = "cpu") -> nn.Module:
        """Build a model in eval mode, fp32, with random weights (`seed=None` keeps timm's own).

        Raises `Unbuildable`.
        """
        with raising(UNBUILT):
            model = arguments.build(self.name, {**args_of(config), **self.extra}, device).float().eval()
        if seed is not None:
            perturb(model, seed)
        return model

    def state_in_file(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in model.state_dict().items()}

    def reload(self, config: Config, state: Mapping[str, Tensor]) -> nn.Module:
        """Load such a file as `timm.create_model` does for a folder. Raises `Unbuildable`."""
        model = self.build(config, None)
        with raising(UNLOADED):
            model.load_state_dict(dict(state), strict=True)
        return model

    def example(self, model: nn.Module, config: Config, seed: int = 0) -> dict[str, Tensor]:
        """Return noise images under the name of the forward pass's first argument."""
        first = next(iter(inspect.signature(model.forward).parameters))
        generator = torch.Generator().manual_seed(seed)
        channels = config.get("in_chans") or 3
        return {first: torch.randn(BATCH, channels, self.side, self.side, generator=generator)}


def args_of(config: Config) -> Config:
    """Return the constructor arguments of a flat config."""
    return arguments.unflatten({k: v for k, v in config.items() if k != "model_type"})


# -- exploration --------------------------------------------------------------------------------------


def explore(flat: Config) -> Finding:
    """Return everything that can be found about a timm family, from a complete flat config.

    Errors of timm are never raised.
    """
    announce(f"timm/{flat['model_type']}")
    with quietly(), torch.random.fork_rng(devices=[]):
        library = TimmLibrary.of(flat)
        try:
            shown, small = first_small(library, flat)
        except Unbuildable as error:
            return Finding(flat["model_type"], library.cls.__name__, (), f"no small model of it runs: {error}")
        return TimmSearch(shown, small).finding()


def first_small(library: TimmLibrary, flat: Config) -> tuple[TimmLibrary, Config]:
    """Return the first small config that runs, and the library with images of its size. Raises `Unbuildable`."""
    return first_that_runs((replace(library, side=side), small) for small, side in arguments.attempts(flat))


def distance(key: str, level: Level) -> int:
    """Rank how well a key matches a stage: 0 for the stage's own list entry, `FAR` for that of another stage."""
    places, own = level.key.split(".")[1:], key.split(".")[1:]
    return 0 if own == places else 1 if own in (places[:1], places[-1:]) else FAR if own else 2


class TimmSearch(Search):
    """The exploration of a timm family: keys are constructor arguments, many with one entry per stage."""

    library: TimmLibrary
    divides = False

    def finding(self) -> Finding:
        finding = super().finding()
        asked = any(arguments.base(key) in arguments.DEPTHS for key in self.config)
        reason = finding.trouble if asked else "its constructor takes no number of layers"
        return replace(finding, trouble=finding.trouble and reason)

    def general(self, key: str) -> str:
        name = arguments.base(key)
        return GENERAL.get(name, name)

    def find_keys(self, names: tuple[str, ...], level: Level) -> list[str]:
        """Return the keys of such a name, first the entry of the stage, then those that apply to all stages."""
        away = {k: distance(k, level) for k in numbers(self.config) if self.general(k) in names}
        return sorted((k for k in away if away[k] < FAR), key=away.get)

    def width(self, stage: Stage) -> int | None:
        name, axis = stage.width_at
        return self.base[stage.layer.format(i=1) + name][axis]

    def begin(self, level: Level) -> Stage:
        return replace(super().begin(level), width_key="", width_at=self.find_width_axis(level))

    def lean(self, spec: dict[str, Any], now: Numbers) -> tuple[Library, Config]:
        wide = {"base": self.library.name, "native": {spec["heads"]: now.heads}, "stages": [dict(spec)]}
        return replace(self.library, extra={"lean": wide}), self.config | {spec["head_dim"]: now.head_dim}

    def with_mlp(self, stage: Stage, level: Level) -> Stage:
        return self.with_ratio(replace(stage, mlp_trouble="its constructor takes no ratio of the MLP"), level)

    def ratio_keys(self, level: Level) -> list[str]:
        ratios = [k for k in self.config if self.general(k) == "mlp_ratio" and distance(k, level) < FAR]
        return [k for k in ratios if is_number(self.config[k])]


# -- declaration --------------------------------------------------------------------------------------


def architecture(config: Config) -> Architecture:
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


def native(config: Config) -> Config:
    """Return the config of timm's own model for a config of ours."""
    args = dict(config["model_args"])
    spec = args.pop("lean")
    for stage in spec["stages"]:
        args.pop(stage["head_dim"], None)
    for key, heads in spec["native"].items():
        write_key(args, key, heads)
    return dict(config) | {"architecture": spec["base"], "model_args": args}
