"""Find the effect of each number of a config: rebuild the model with one number changed, and compare tensor sizes.

A key whose change removes a layer is a depth; an axis that grows with a key consists of that key's units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from leansurgeon.architectures.infer import tiny
from leansurgeon.architectures.infer.library import LARGEST, Library, Unbuildable, outputs
from leansurgeon.architectures.infer.tiny import Config, aliases, per_layer
from leansurgeon.architectures.limits import TAPS, follow_layers
from leansurgeon.architectures.tensors import is_count, layer_number_pattern

Kind = TypeVar("Kind", bound=Library)
Shapes = dict[str, tuple[int, ...]]
Axis = tuple[str, int]  # tensor name and axis number
DEPTH_WORDS = ("layer", "depth", "block", "stages")  # occur in keys that may count layers


def shapes(library: Library, config: Config) -> Shapes:
    """Return the size of every tensor in a file, by name. Raises `Unbuildable`."""
    return sizes(library, library.build(config, None))


def sizes(library: Library, model: nn.Module) -> Shapes:
    """Return the size of every tensor of a built model, by its name in the file."""
    return {name: tuple(tensor.shape) for name, tensor in library.state_in_file(model).items()}


def growth_of_axes(before: Shapes, after: Shapes) -> dict[Axis, int] | None:
    """Return by how much each axis grew; None if the set of tensors changed."""
    if set(before) != set(after) or any(len(before[n]) != len(after[n]) for n in before):
        return None
    return {
        (name, axis): after[name][axis] - size
        for name in before
        for axis, size in enumerate(before[name])
        if after[name][axis] != size
    }


@dataclass(frozen=True)
class Level:
    """A stage: the config key of its depth, the prefix of its blocks in files (`model.layers.{i}.`) and in memory."""

    key: str
    layer: str
    modules: str
    depth: int
    lists: tuple[str, ...] = ()  # config keys with one entry per layer
    taps: tuple[str, ...] = ()  # config keys for the layers after which other parts take outputs
    outside: bool = False  # whether a tensor outside the blocks also shrinks with the depth


def numbers(config: Config) -> list[str]:
    """Return the keys that hold a positive integer."""
    return [k for k, v in config.items() if is_count(v)]


def drop_one_layer(library: Library, config: Config, key: str) -> tuple[Config, nn.Module] | None:
    """Return the config with one layer less and its model; None if the library builds none.

    Some libraries require a last layer of a certain kind, and some lists belong to another stage (LED's windows).
    """
    depth = config[key]
    shorter = config | {key: depth - 1}
    lists = list(per_layer(config, depth))
    for left in ([*range(depth - 1)], [*range(depth - 2), depth - 1], None):
        less = shorter
        if left:
            cut = {k: [config[k][i] for i in left] for k in lists}
            less = config | cut | {key: depth - 1} | follow_layers(config, (), (), left, depth)
        with suppress(Unbuildable):
            return less, library.build(less, None)
    return None


def module_lists(model: nn.Module) -> dict[str, int]:
    kinds = nn.ModuleList | nn.Sequential | nn.ModuleDict
    return {name: len(module) for name, module in model.named_modules() if isinstance(module, kinds)}


def levels(library: Library, config: Config) -> tuple[list[Level], list[str]]:
    """Return the stages of a model, and the reasons why other keys are no stages."""
    base_model = library.build(config, None)
    base = sizes(library, base_model)
    lists = module_lists(base_model)
    stages, troubles = [], []
    for key in numbers(config):
        named = any(word in key for word in DEPTH_WORDS) and not key.startswith(("first_k", "max_window"))
        if not named or not 2 <= config[key] <= 12 or (shorter_one := drop_one_layer(library, config, key)) is None:
            continue
        less, model = shorter_one
        after = sizes(library, model)
        gone = sorted(set(base) - set(after))
        if not gone:
            continue
        shorter = [n for n, size in module_lists(model).items() if lists.get(n) == config[key] == size + 1]
        prefix = common_layer(gone, config[key] - 1, set(after))
        if prefix is None or set(after) - set(base):
            troubles.append(f"{key}: its layers stand in several lists or under changing names")
            continue
        if len(shorter) != 1:
            troubles.append(f"{key}: {len(shorter)} lists of modules shorten with it")
            continue
        outside = any(after[name] != base[name] and not layer_number_pattern(prefix).match(name) for name in after)
        of_layers = tuple(k for k in less if isinstance(less[k], list | tuple) and len(less[k]) == len(config[k]) - 1)
        # Keys of the whole model refer to its vision.
        outer = library.outer if library.section == "vision_config" else {}
        taps = [k for k in TAPS if not stages and (config.get(k) is not None or outer.get(k) is not None)]
        stages.append(Level(key, prefix, shorter[0] + ".{i}", config[key], of_layers, tuple(taps), outside))
    first_of_each = {level.layer: level for level in reversed(stages)}
    if len(first_of_each) < len(stages):
        troubles.append("several keys shorten one list of layers")
    return [level for level in stages if level is first_of_each[level.layer]], troubles


def common_layer(gone: list[str], last: int, left: set[str]) -> str | None:
    """Return the prefix of the last layer's names, with `{i}` for its number; None if they share no such prefix."""
    places = Counter()
    for name in gone:
        parts = name.split(".")
        for at, part in enumerate(parts):
            if part == str(last):
                places[".".join([*parts[:at], "{i}", ""])] += 1
    starts = {p: (p.format(i=0), p.format(i=last)) for p, count in places.items() if count == len(gone)}
    # If tensors with the last number remain, it numbers stages.
    whole = [p for p, ends in starts.items() if [any(n.startswith(end) for n in left) for end in ends] == [True, False]]
    return min(whole, key=len, default=None)


def effect(library: Library, config: Config, base: Shapes, changes: Mapping[str, int]) -> dict[Axis, int] | None:
    """Return the growth of every axis with these numbers; None if the library refuses them or builds other tensors."""
    try:
        return growth_of_axes(base, shapes(library, config | dict(changes)))
    except Unbuildable:
        return None


def run_small(library: Library, config: Config) -> None:
    """Raise `Unbuildable` if a model does not run on inputs of its kind."""
    model = library.build(config)
    outputs(model, library.example(model, config))


def first_that_runs(attempts: Iterable[tuple[Kind, Config]]) -> tuple[Kind, Config]:
    """Return the first library and config whose model is small enough for a trial and runs.

    Raises `Unbuildable` with the reason of the first attempt.
    """
    first = None
    for library, small in attempts:
        try:
            if (size := sum(p.numel() for p in library.build(small, None, "meta").parameters())) > LARGEST:
                raise Unbuildable(f"it has {size / 1e6:.0f} million parameters however small its numbers")
            run_small(library, small)
            return library, small
        except Unbuildable as error:
            first = first or error
    raise first


def build_small_config(library: Library, full: Config, *, geometry: bool = False) -> Config:
    """Return the first small config that runs (see `tiny.shrunk`). Raises `Unbuildable`."""
    attempts = range(tiny.ATTEMPTS + 1)
    return first_that_runs((library, tiny.shrunk(full, attempt, geometry=geometry)) for attempt in attempts)[1]


def fill_in_numbers(library: Library, small: Config) -> Config:
    """Return the config with explicit numbers for those left to the library, if the library accepts such numbers."""
    names = aliases(small)
    base = shapes(library, small)
    for wanted, value in ((tiny.HEAD_DIMS, 8), (tiny.MLPS, 112)):
        own = {k: small[k] for k in small if names.get(k, k) in wanted}
        if any(isinstance(number, int) for number in own.values()):
            continue
        general = wanted[:1] if wanted is tiny.HEAD_DIMS else ()
        for key in dict.fromkeys([*(k for k in own if own[k] is None), *general]):
            tried = small | {key: value}
            with suppress(Unbuildable):
                if growth_of_axes(base, shapes(library, tried)):
                    run_small(library, tried)
                    small, base = tried, shapes(library, tried)
                    break
    return small
