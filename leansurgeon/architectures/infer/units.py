"""Heads and MLP units of a small model: which axes are made of them, and the proof that they can come and go.

The proof has four parts. New units whose output is zero change nothing; the same units with an output change something
(else nobody was looking); units that change places (heads within their groups) change nothing; a file without some
units computes what the whole file computes when those are silent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from leansurgeon.architectures.infer.cuts import ALIVE, EQUAL, WholeModel
from leansurgeon.architectures.infer.differences import Axis, Level
from leansurgeon.architectures.infer.library import Unbuildable, difference, outputs
from leansurgeon.architectures.infer.tiny import Config
from leansurgeon.architectures.infer.words import (
    FRESH,
    Maps,
    StageNumbers,
    UnitPlace,
    choices,
    move_units,
    same,
    silence_units,
)
from leansurgeon.architectures.tensors import layer_number_pattern

ROUNDING = 1e-2  # of the outputs' spread: units that are not alike differ by more
SAME_ROUNDING = 4.0  # what the order of a sum changes is at most so many times what the last bit of the weights does


@dataclass(frozen=True)
class Trial(WholeModel):
    """A small model with what is measured on it."""

    levels: tuple[Level, ...]

    def locate(self, name: str) -> tuple[int, str] | None:
        """The stage of a tensor and its name within a block; None outside the blocks."""
        for number, level in enumerate(self.levels):
            if hit := layer_number_pattern(level.layer).match(name):
                return number, name[hit.end() :]
        return None

    def run(self, config: Config, state: Mapping[str, Tensor], *, double: bool = False) -> Tensor:
        """The outputs of a file of such a model, of a `double` of it in float64. Raises `Unbuildable`."""
        model = self.library.reload(config, state)
        if not double:
            return outputs(model, self.inputs)
        inputs = {
            k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in self.inputs.items()
        }
        return outputs(model.double(), inputs)


class ExploredFamily(Protocol):
    """A family that is being looked at (`explore.Search`): its small model and config, names in memory by those in
    files, the sizes of what is in memory, and what holds its inputs first.
    """

    trial: Trial
    config: Config
    levels: list[Level]
    memory: dict[str, str]
    state_sizes: dict[str, tuple[int, ...]]
    turned: set[str]


@dataclass(frozen=True)
class UnitKind:
    """One kind of units: how the config counts them, and the maps of its proof."""

    numbers: StageNumbers
    change: Callable[[Maps], dict[str, Any]]  # config keys for these maps
    add: Maps
    permute: Maps
    remove: Maps


def proof(trial: Trial, *parts: tuple[UnitKind, Mapping[str, list[UnitPlace]]]) -> str | None:
    """Why units of a kind at these places, or of several stages that one number of the config counts, cannot come and
    go; None where all four parts hold.
    """

    def run_with(pick: Callable[[UnitKind], Maps], *, double: bool = False, **how: Any) -> Tensor:
        config, state = trial.config, trial.state
        for kind, at in parts:
            config = config | kind.change(pick(kind))
            state = move_units(state, at, kind.numbers, pick(kind), 1, **how)
        return trial.run(config, state, double=double)

    def error_of_permutation() -> float:
        """What other places change, less what is the rounding of fp32, which sharp scores and routers amplify: in
        float64, and where the code casts to fp32 itself, against weights that differ by their last bit.
        """
        turned = difference(trial.output, run_with(lambda kind: kind.permute))
        if EQUAL < turned < ROUNDING:
            try:
                exact = trial.run(trial.config, trial.state, double=True)
                return difference(exact, run_with(lambda kind: kind.permute, double=True))
            except Unbuildable:
                last_bit = {k: v.nextafter(-v) if v.is_floating_point() else v for k, v in trial.state.items()}
                if turned <= SAME_ROUNDING * difference(trial.output, trial.run(trial.config, last_bit)):
                    return 0.0
        return turned

    try:
        added = difference(trial.output, run_with(lambda kind: kind.add))
        if added > EQUAL:
            return f"adding silent units changes the output ({added:.1e})"
        if difference(trial.output, run_with(lambda kind: kind.add, loud=True)) < ALIVE:
            return "new units do not reach the output"
        if (turned := error_of_permutation()) > EQUAL:
            return f"units are not alike: changing their places changes the output ({turned:.1e})"
        silent = trial.state
        for kind, at in parts:
            silent = silence_units(silent, at, kind.numbers, kind.remove)
        removed = difference(trial.run(trial.config, silent), run_with(lambda kind: kind.remove))
        if removed > EQUAL:
            return f"removing units is not the same as silencing them ({removed:.1e})"
    except Unbuildable as error:
        return str(error)
    return None


def find_unreached(trial: Trial, at: Mapping[str, list[UnitPlace]]) -> str | None:
    """A module beside the blocks whose units nobody listens to here, so that nothing is proven of them."""
    for name, places in at.items():
        if trial.locate(name) is None and any(place.sink for place in places):
            silent = dict(trial.state) | {name: torch.zeros_like(trial.state[name])}
            if difference(trial.output, trial.run(trial.config, silent)) < ALIVE:
                return f"'{name}' beside the blocks is not reached"
    return None


# -- where the units stand ------------------------------------------------------------------------


def conv1d(model: nn.Module) -> set[str]:
    """Weights that hold their inputs first."""
    return {f"{name}.weight" for name, module in model.named_modules() if type(module).__name__ == "Conv1D"}


def is_sink(trial: Trial, name: str, axis: int, flipped: bool) -> bool:
    """Whether an axis is what enters a matrix."""
    shape = trial.state[name].shape
    if len(shape) < 2 or ("embed" in name and len(shape) == 2 and axis == 1):
        return len(shape) >= 2
    turned = name in conv1d(trial.model) or (flipped and len(shape) == 3)
    first_two = len(shape) - 2 if len(shape) == 3 else 0
    entering = first_two if turned else first_two + 1
    return axis == entering and len(shape) <= 4  # a convolution's channels stand as a matrix's do


def explain_axes(
    trial: Trial, options: Mapping[Axis, list[str]], kinds: UnitKind | Mapping[int, UnitKind]
) -> tuple[dict[str, list[UnitPlace]], str | None]:
    """Words for every axis with which the proof holds, and why the best try failed where none does. `kinds` are those
    of each stage where one number counts units of several.
    """
    trouble: str | None = "no tensor follows the number"
    places: dict[str, list[UnitPlace]] = {}
    for places in guesses(trial, options):
        by_stage = {0: places} if isinstance(kinds, UnitKind) else of_stages(trial, places)
        if not all(any(p.sink for of_layer in own.values() for p in of_layer) for own in by_stage.values()):
            trouble = "no projection leads from the units to the stream"
            continue
        trouble = proof(
            trial, *((kinds if isinstance(kinds, UnitKind) else kinds[n], own) for n, own in by_stage.items())
        )
        if trouble is None:
            return places, None
    return places, trouble


def of_stages(trial: Trial, places: Mapping[str, list[UnitPlace]]) -> dict[int, dict[str, list[UnitPlace]]]:
    """Places by stage; those beside the blocks are with the first."""
    by_stage: dict[int, dict[str, list[UnitPlace]]] = {}
    for name, here in places.items():
        by_stage.setdefault((trial.locate(name) or (0,))[0], {})[name] = here
    return by_stage


def guesses(trial: Trial, options: Mapping[Axis, list[str]]) -> Iterator[dict[str, list[UnitPlace]]]:
    """Where the units may stand, the likelier first."""
    by_template = {f"{name}|{axis}": words for (name, axis), words in options.items()}
    solid = any(trial.state[name].dim() == 3 for name, _ in options)
    for words in choices(by_template):
        for flipped in (False, True) if solid else (False,):
            places: dict[str, list[UnitPlace]] = {}
            for name, axis in options:
                placed = trial.locate(name)
                template = placed[1] if placed else name
                sink = is_sink(trial, name, axis, flipped)
                places.setdefault(name, []).append(UnitPlace(template, axis, words[f"{name}|{axis}"], sink))
            yield places


# -- heads ----------------------------------------------------------------------------------------


def head_maps(now: StageNumbers, heads: int) -> tuple[Tensor, Tensor]:
    """More or fewer heads beside the same key/value heads; plain attention has as many of both."""
    plain = now.kv_heads == now.heads
    if plain:
        map_of_heads = torch.full((heads,), FRESH)
        map_of_heads[: min(heads, now.heads)] = torch.arange(min(heads, now.heads))
        return map_of_heads, map_of_heads.clone()
    old, new = now.heads // now.kv_heads, heads // now.kv_heads
    groups = torch.full((now.kv_heads, new), FRESH)
    groups[:, : min(old, new)] = torch.arange(now.heads).reshape(now.kv_heads, old)[:, : min(old, new)]
    return groups.reshape(-1), torch.arange(now.kv_heads)


def heads_kind(now: StageNumbers, key: str, kv_key: str | None, more: int, fewer: int) -> UnitKind:
    """Heads as the config's `key` counts them (and `kv_key`, where plain attention has one)."""
    plain, units = now.kv_heads == now.heads, torch.arange(now.mlp)

    def change(maps: Maps) -> dict[str, Any]:
        changes = {key: len(maps.heads)}
        return changes | ({kv_key: len(maps.kv_heads)} if kv_key and plain else {})

    def maps(pair: tuple[Tensor, Tensor]) -> Maps:
        return Maps(*pair, units)

    last = head_maps(now, fewer)
    if plain:  # the first ones go, so that others move
        last = (torch.arange(now.heads - fewer, now.heads),) * 2
    turned = torch.arange(now.heads).reshape(now.kv_heads, -1).flip(0, 1)  # groups, and the heads within them
    turned = turned.reshape(-1), torch.arange(now.kv_heads).flip(0)
    return UnitKind(now, change, maps(head_maps(now, more)), maps(turned), maps(last))


def mlp_kind(now: StageNumbers, change: Callable[[int], dict[str, Any]], more: int, fewer: int) -> UnitKind:
    """MLP units as the config counts them: `change` gives the keys for a number of units."""
    old = same(now)
    grown = torch.full((more,), FRESH)
    grown[: now.mlp] = torch.arange(now.mlp)
    pick = [
        replace(old, units=u) for u in (grown, torch.arange(now.mlp).flip(0), torch.arange(now.mlp - fewer, now.mlp))
    ]
    return UnitKind(now, lambda maps: change(len(maps.units)), *pick)
