"""Heads and MLP units of a small model: which axes consist of them, and the proof that they can be added and removed.

The proof has four parts. New units with zero output change nothing; the same units with an output change something
(otherwise nothing was tested); permuting units (heads within their groups) changes nothing; a file without some units
computes what the whole file computes when those units are silenced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leansurgeon.architectures.axes import UnitMaps, map_added_heads, widen
from leansurgeon.architectures.infer.cuts import ALIVE, EQUAL, Trial
from leansurgeon.architectures.infer.differences import Axis
from leansurgeon.architectures.infer.library import Unbuildable, difference
from leansurgeon.architectures.infer.words import Places, UnitPlace, move_units, silence_units
from leansurgeon.shape import Stage

ROUNDING = 1e-2  # relative to the outputs' spread: units that are not alike differ by more
SAME_ROUNDING = 4.0  # largest effect of summation order, in multiples of the effect of the weights' last bit


@dataclass(frozen=True)
class UnitKind:
    """One kind of unit: how the config counts them, and the index maps of its proof."""

    numbers: Stage
    change: Callable[[UnitMaps], dict[str, Any]]  # config keys for these maps
    add: UnitMaps
    permute: UnitMaps
    remove: UnitMaps


Part = tuple[UnitKind, Places]


def proof(trial: Trial, parts: list[Part]) -> str | None:
    """Return why units at these places cannot be added and removed; None if all four parts of the proof hold.

    `parts` has several entries if one number of the config counts the units of several stages.
    """

    def run_with(pick: Callable[[UnitKind], UnitMaps], *, double: bool = False, **how: Any) -> Tensor:
        config, state = trial.config, trial.state
        for kind, at in parts:
            config = config | kind.change(pick(kind))
            state = move_units(state, at, kind.numbers, pick(kind), 1, **how)
        return trial.run(config, state, double=double)

    def error_of_permutation() -> float:
        """Return the effect of a permutation beyond fp32 rounding, which sharp scores and routers amplify.

        It is measured in float64; if the code casts to fp32 itself, it is compared with the effect of changing the
        weights' last bit.
        """
        turned = difference(trial.output, run_with(lambda kind: kind.permute))
        if EQUAL < turned < ROUNDING:
            try:
                exact = trial.run(trial.config, trial.state, double=True)
                return difference(exact, run_with(lambda kind: kind.permute, double=True))
            except Unbuildable:
                last_bits = [  # both directions, as routers may react to one more than to the other
                    {k: v.nextafter(v * to) if v.is_floating_point() else v for k, v in trial.state.items()}
                    for to in (2, -1)
                ]
                moved = max(difference(trial.output, trial.run(trial.config, state)) for state in last_bits)
                if turned <= SAME_ROUNDING * moved:
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


def find_unreached(trial: Trial, at: Places) -> str | None:
    """Return a module beside the blocks whose output has no effect here, so that nothing is proven about its units."""
    for name, places in at.items():
        if trial.locate(name) is None and any(place.sink for place in places):
            silent = dict(trial.state) | {name: torch.zeros_like(trial.state[name])}
            if difference(trial.output, trial.run(trial.config, silent)) < ALIVE:
                return f"'{name}' beside the blocks is not reached"
    return None


# -- where the units are --------------------------------------------------------------------------


def is_sink(trial: Trial, name: str, axis: int, flipped: bool) -> bool:
    """Return whether an axis is the input axis of a matrix."""
    dims = trial.state[name].dim()
    if dims == 2 and axis == 1 and "embed" in name:
        return True
    turned = name in trial.turned or (flipped and dims == 3)
    # A third axis before it counts experts; a convolution's channels are arranged like a matrix's.
    return 2 <= dims <= 4 and axis == (dims == 3) + (not turned)


def explain_axes(
    trial: Trial, options: Mapping[Axis, list[str]], parts: Callable[[Places], Iterable[Part]]
) -> tuple[Places, str | None]:
    """Return words for every axis for which the proof of its `parts` holds, or why the best attempt failed."""
    trouble: str | None = "no tensor follows the number"
    places = {}
    for places in guesses(trial, options):
        proven = list(parts(places))
        if not all(any(place.sink for here in own.values() for place in here) for _, own in proven):
            trouble = "no projection leads from the units to the stream"
        elif (trouble := proof(trial, proven)) is None:
            break
    return places, trouble


def of_stages(trial: Trial, places: Places) -> dict[int, Places]:
    """Return places by stage; those beside the blocks are counted with the first."""
    by_stage: dict[int, Places] = {}
    for name, here in places.items():
        by_stage.setdefault((trial.locate(name) or (0,))[0], {})[name] = here
    return by_stage


def guesses(trial: Trial, options: Mapping[Axis, list[str]]) -> Iterator[Places]:
    """Yield guesses of where the units are, the likelier first: by the first word of every axis, then the second."""
    solid = any(trial.state[name].dim() == 3 for name, _ in options)
    for number in range(max(map(len, options.values()), default=0)):
        for flipped in (False, True) if solid else (False,):
            places = {}
            for (name, axis), words in options.items():
                template = (trial.locate(name) or (0, name))[1]
                word, sink = words[min(number, len(words) - 1)], is_sink(trial, name, axis, flipped)
                places.setdefault(name, []).append(UnitPlace(template, axis, word, sink))
            yield places


# -- kinds ----------------------------------------------------------------------------------------


def heads_kind(now: Stage, key: str, kv_key: str | None, more: int, fewer: int) -> UnitKind:
    """Return heads as counted by the config's `key` (and `kv_key`, if plain attention has one)."""
    plain, units = now.kv_heads == now.heads, np.arange(now.mlp_dim)

    def change(maps: UnitMaps) -> dict[str, Any]:
        return {key: len(maps.heads)} | ({kv_key: len(maps.kv_heads)} if kv_key and plain else {})

    def with_heads(heads: int) -> UnitMaps:
        return UnitMaps(*map_added_heads(now, replace(now, heads=heads)), units)

    turned = np.arange(now.heads).reshape(now.kv_heads, -1)[::-1, ::-1].reshape(-1)  # groups, and heads within them
    permuted = UnitMaps(turned, np.arange(now.kv_heads)[::-1], units)
    last = np.arange(now.heads - fewer, now.heads)  # in plain attention the first ones are removed, so that others move
    left = UnitMaps(last, last, units) if plain else with_heads(fewer)
    return UnitKind(now, change, with_heads(more), permuted, left)


def mlp_kind(key: str, values: Mapping[int, Any]) -> UnitKind:
    """Return MLP units as counted by the config's `key`: `values` for the present number of units, more, and fewer."""
    units, more, fewer = values
    one = np.arange(1)
    picks = widen(units, more), np.arange(units)[::-1], np.arange(units - fewer, units)
    now = Stage(1, 1, 1, 1, units, 1)
    return UnitKind(now, lambda maps: {key: values[len(maps.units)]}, *(UnitMaps(one, one, pick) for pick in picks))
