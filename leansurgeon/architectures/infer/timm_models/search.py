"""One family of timm while it is looked at: where its inference differs from that of transformers' families."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from leansurgeon.architectures.infer.differences import Level, first_that_runs
from leansurgeon.architectures.infer.explore import Search
from leansurgeon.architectures.infer.finding import Finding, Stage
from leansurgeon.architectures.infer.library import Library, Unbuildable, quietly
from leansurgeon.architectures.infer.timm_models import arguments
from leansurgeon.architectures.infer.timm_models.library import TimmLibrary
from leansurgeon.architectures.infer.tiny import HEADS, WIDTHS, Config
from leansurgeon.shape import Stage as Numbers

GENERAL = {
    **dict.fromkeys(arguments.HEADS, HEADS[0]),
    **dict.fromkeys(arguments.WIDTHS, WIDTHS[0]),
    **dict.fromkeys(arguments.RATIOS, "mlp_ratio"),
}


def explore(flat: Config) -> Finding:
    """Everything that is known of a family of timm afterwards, from a whole flat config. Never raises for what timm
    does.
    """
    with quietly(), torch.random.fork_rng(devices=[]):
        library = TimmLibrary.of(flat)
        try:
            small, shown = first_small(library, flat)
        except Unbuildable as error:
            return Finding(flat["model_type"], library.cls.__name__, (), f"no small model of it runs: {error}")
        return TimmSearch(shown, small).finding()


def first_small(library: TimmLibrary, flat: Config) -> tuple[Config, TimmLibrary]:
    """The first small config that runs, and the library that shows it images of its size. Raises `Unbuildable`."""
    attempts = ((replace(library, side=side), small) for small, side in arguments.attempts(flat))
    shown, small = first_that_runs(attempts)
    return small, shown


class TimmSearch(Search):
    """Keys are arguments of a constructor, many with one entry a stage."""

    library: TimmLibrary
    divides = False

    def __init__(self, library: Library, config: Config) -> None:
        super().__init__(library, config)
        self.widths = [self.find_width_axis(level) for level in self.levels]

    def finding(self) -> Finding:
        finding = super().finding()
        asked = any(arguments.base(key) in arguments.DEPTHS for key in self.config)
        reason = finding.trouble if asked else "its constructor takes no number of layers"
        return replace(finding, trouble=finding.trouble and reason)

    def general(self, key: str) -> str:
        name = arguments.base(key)
        return GENERAL.get(name, name)

    def find_keys(self, names: tuple[str, ...], level: Level) -> list[str]:
        """Keys of such a name: the entry of the stage first, then what holds for all stages."""
        places = level.key.split(".")[1:]

        def fits(key: str) -> int:
            own = key.split(".")[1:]
            return 0 if own == places else 1 if own in (places[:1], places[-1:]) else 2 if not own else 9

        keys = [k for k, v in self.config.items() if self.general(k) in names and isinstance(v, int) and v > 0]
        return [k for k in sorted(keys, key=fits) if fits(k) < 9]

    def width(self, stage: Stage) -> int | None:
        name, axis = stage.width_at
        return self.base[stage.layer.format(i=1) + name][axis]

    def stage(self, level: Level) -> Stage:
        at = self.widths[self.levels.index(level)]
        stage = Stage(level.layer, level.key, "", level.lists, width_at=at)
        return self.with_mlp(self.with_heads(self.with_depth(stage, level), level), level)

    def lean(self, spec: dict[str, Any], now: Numbers) -> tuple[Library, Config]:
        library = self.library.widening(spec, {spec["heads"]: now.heads})
        return library, self.config | {spec["head_dim"]: now.head_dim}

    def with_mlp(self, stage: Stage, level: Level) -> Stage:
        return self.with_ratio(replace(stage, mlp_trouble="its constructor takes no ratio of the MLP"), level)

    def ratio_keys(self, level: Level) -> list[str]:
        places = level.key.split(".")[1:]
        ratios = [k for k in self.config if arguments.base(k) in arguments.RATIOS]
        fit = [k for k in ratios if k.split(".")[1:] in (places, places[:1], places[-1:], [])]
        return [k for k in fit if not isinstance(self.config[k], bool | str | None)]
