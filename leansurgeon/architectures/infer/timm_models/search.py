"""One family of timm while it is looked at: where its inference differs from that of transformers' families."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from leansurgeon.architectures.infer.differences import Axis, Level, check_runs, effect
from leansurgeon.architectures.infer.explore import Search
from leansurgeon.architectures.infer.finding import Finding, Part, Stage
from leansurgeon.architectures.infer.library import Library, Unbuildable, quietly
from leansurgeon.architectures.infer.timm_models import arguments
from leansurgeon.architectures.infer.timm_models.library import TimmLibrary
from leansurgeon.architectures.infer.tiny import HEADS, WIDTHS, Config
from leansurgeon.architectures.infer.units import Kind, guesses, mlp_kind, proof, unreached
from leansurgeon.architectures.infer.widened import Heads
from leansurgeon.architectures.infer.words import Numbers, Place, mlp_words

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
    """The first small config that runs, and the library that shows it images of its size. Raises `Unbuildable` with
    what the first attempt said.
    """
    first = None
    for small, side in arguments.attempts(flat):
        shown = replace(library, side=side)
        try:
            check_runs(shown, small, shown.example)
            return small, shown
        except Unbuildable as error:
            first = first or error
    raise first


class TimmSearch(Search):
    """Keys are arguments of a constructor, many with one entry a stage."""

    library: TimmLibrary
    divides = False

    def __init__(self, library: Library, config: Config) -> None:
        super().__init__(library, config)
        self.ratios: dict[str, tuple[dict[int, Part], str]] = {}
        self.widths = [self.measured(level) for level in self.levels]

    def finding(self) -> Finding:
        finding = super().finding()
        asked = any(arguments.base(key) in arguments.DEPTHS for key in self.config)
        reason = finding.trouble if asked else "its constructor takes no number of layers"
        return replace(finding, trouble=finding.trouble and reason)

    def example(self, model: torch.nn.Module, config: Config) -> dict[str, torch.Tensor]:
        return self.library.example(model, config)

    def general(self, key: str) -> str:
        name = arguments.base(key)
        return GENERAL.get(name, name)

    def named(self, names: tuple[str, ...], level: Level) -> list[str]:
        """Keys of such a name: the entry of the stage first, then what holds for all stages."""
        places = level.key.split(".")[1:]

        def fits(key: str) -> int:
            own = key.split(".")[1:]
            return 0 if own == places else 1 if own in (places[:1], places[-1:]) else 2 if not own else 9

        keys = [k for k, v in self.config.items() if self.general(k) in names and isinstance(v, int) and v > 0]
        return [k for k in sorted(keys, key=fits) if fits(k) < 9]

    def measured(self, level: Level) -> tuple[str, int]:
        """A tensor of a block and its axis that has the width, which is what most axes of a block have."""
        start = level.layer.format(i=1)
        inside = {n.removeprefix(start): s for n, s in self.base.items() if n.startswith(start)}
        width = Counter(size for s in inside.values() for size in s if size > 1).most_common(1)[0][0]
        places = [(n, axis) for n, s in inside.items() for axis, size in enumerate(s) if size == width]
        return min(places, key=lambda place: len(inside[place[0]]))

    def width(self, stage: Stage) -> int | None:
        name, axis = stage.width_at
        return self.base[stage.layer.format(i=1) + name][axis]

    def stage(self, level: Level) -> Stage:
        at = self.widths[self.levels.index(level)]
        stage = Stage(level.layer, level.key, "", level.lists, width_at=at)
        return self.with_mlp(self.with_heads(self.with_depth(stage, level), level), level)

    def lean(self, spec: dict[str, Any], now: Heads) -> tuple[Library, Config]:
        library = self.library.widening(spec, {now.key: now.heads})
        return library, self.config | {spec["head_dim"]: now.head_dim}

    # -- MLP -----------------------------------------------------------------------------------------

    def with_mlp(self, stage: Stage, level: Level) -> Stage:
        """The MLP as a multiple of the width, which may hold for several stages at once."""
        trouble = "its constructor takes no ratio of the MLP"
        for key in self.ratio_keys(level):
            if key not in self.ratios:
                self.ratios[key] = self.proven_ratio(key)
            parts, said = self.ratios[key]
            number = self.levels.index(level)
            if number in parts:
                return replace(stage, mlp_key=key, mlp_ratio=True, mlp=parts[number], mlp_trouble=said)
            trouble = said or trouble
        return replace(stage, mlp_trouble=trouble)

    def ratio_keys(self, level: Level) -> list[str]:
        places = level.key.split(".")[1:]
        ratios = [k for k in self.config if arguments.base(k) in arguments.RATIOS]
        fit = [k for k in ratios if k.split(".")[1:] in (places, places[:1], places[-1:], [])]
        return [k for k in fit if not isinstance(self.config[k], bool | str | None)]

    def proven_ratio(self, key: str) -> tuple[dict[int, Part], str]:
        """The units that a ratio counts, by stage, and why they cannot change."""
        old = self.config[key]
        grown = effect(self.library, self.config, self.base, {key: old + 1})
        if grown is None:
            return {}, f"timm does not build it with another {key}"
        by_stage: dict[int, dict[Axis, int]] = {}
        for at, by in grown.items():
            placed = self.trial.placed(at[0]) or ((0, at[0]) if len(self.levels) == 1 else None)
            if placed is None:
                return {}, f"'{at[0]}' outside the blocks follows the MLP"
            by_stage.setdefault(placed[0], {})[at] = by
        kinds, options = {}, {}
        for number, axes in by_stage.items():
            width = min(axes.values())
            now = Numbers(1, 1, 1, int(width * old))
            words = {at: mlp_words(self.base[at[0]][at[1]], by // width, now) for at, by in axes.items()}
            name, axis = self.widths[number]
            own = self.base[self.levels[number].layer.format(i=1) + name][axis]
            if any(not by_layer for by_layer in words.values()) or width != own:
                return {}, "its MLP is no plain multiple of the width"
            less = old - 1 if old > 1 else old / 2
            by_units = {now.mlp: old, now.mlp + width: old + 1, int(width * less): less}
            kinds[number] = mlp_kind(now, lambda n, u=by_units: {key: u[n]}, now.mlp + width, int(width * less))
            options |= words
        return self.proven_units(key, kinds, options)

    def proven_units(
        self, key: str, kinds: dict[int, Kind], options: dict[Axis, list[str]]
    ) -> tuple[dict[int, Part], str]:
        trouble = "nothing follows it"
        for places in guesses(self.trial, options):
            apart: dict[int, dict[str, list[Place]]] = {}
            for name, of_layer in places.items():
                apart.setdefault((self.trial.placed(name) or (0,))[0], {})[name] = of_layer
            if any(not any(p.sink for f in own.values() for p in f) for own in apart.values()):
                trouble = "no projection leads from the units to the stream"
                continue
            trouble = proof(self.trial, *((kinds[n], own) for n, own in apart.items()))
            trouble = trouble or unreached(self.trial, places) or ""
            if not trouble:
                break
        return {n: self.part(key, own) for n, own in apart.items()} if options else {}, trouble
