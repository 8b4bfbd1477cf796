"""Explore one family of timm: where that differs from families of transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from leansurgeon.architectures.infer.differences import Level, first_that_runs, numbers
from leansurgeon.architectures.infer.explore import Search, announce
from leansurgeon.architectures.infer.finding import Finding, Stage
from leansurgeon.architectures.infer.library import Library, Unbuildable, quietly
from leansurgeon.architectures.infer.timm_models import arguments
from leansurgeon.architectures.infer.timm_models.library import TimmLibrary
from leansurgeon.architectures.infer.tiny import HEADS, WIDTHS, Config, is_number
from leansurgeon.shape import Stage as Numbers

FAR = 9
GENERAL = {
    **dict.fromkeys(arguments.HEADS, HEADS[0]),
    **dict.fromkeys(arguments.WIDTHS, WIDTHS[0]),
    **dict.fromkeys(arguments.RATIOS, "mlp_ratio"),
}


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
