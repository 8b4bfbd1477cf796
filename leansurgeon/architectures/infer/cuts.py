"""Prove that layers can be dropped: cut a small model as surgery does, skip the layers in memory, and compare both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from leansurgeon.architectures.infer.differences import Level
from leansurgeon.architectures.infer.library import Library, Unbuildable, difference, memory_names, outputs
from leansurgeon.architectures.infer.tiny import INDEX_LISTS, Config
from leansurgeon.architectures.limits import follow_layers, move_taps, of_single_layers
from leansurgeon.architectures.tensors import layer_number_pattern
from leansurgeon.errors import UsageError
from leansurgeon.hooks import Hooks

EQUAL = 3e-5  # relative to the outputs' spread: allowed rounding error
ALIVE = 2e-4  # smallest change that a control must cause
# Keys that count layers from the first one on; they depend on which layers are kept.
COUNTERS = (
    "first_k_dense_replace",
    "moe_layer_start_index",
    "num_dense_layers",
    "n_dense_layers",
    "max_window_layers",
    "num_hash_layers",
)
FIRST = 3  # number of first layers that may be tied to other inputs (image features)


@contextmanager
def passing_on(blocks: Iterable[nn.Module]) -> Iterator[None]:
    """Make these blocks return their input: one hidden state, or as many as they output."""

    def through(_: nn.Module, args: tuple, kwargs: dict, out: Any) -> Any:
        hidden = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()), None))
        if not isinstance(out, tuple | list):
            return hidden
        if 1 < len(out) <= len(args) and all(map(alike, args, out)):
            return type(out)(args[: len(out)])  # several hidden states, all returned unchanged
        return type(out)([hidden, *out[1:]])

    def alike(given: Any, made: Any) -> bool:
        return isinstance(given, Tensor) and isinstance(made, Tensor) and given.shape == made.shape

    with Hooks() as hooks:
        for block in blocks:
            # Run before all other hooks, so that the library's own hooks, which record hidden states, see the passed-on
            # value.
            hooks.after(block, through, with_kwargs=True, prepend=True)
        yield


def skip_blocks(model: nn.Module, level: Level, gone: Sequence[int]) -> AbstractContextManager[None]:
    """Make the removed blocks of a stage return their input."""
    return passing_on(model.get_submodule(level.modules.format(i=i)) for i in gone)


@dataclass(frozen=True)
class Trial:
    """A small model with the content of its file and its outputs; `levels` describe its stages."""

    library: Library
    config: Config
    model: nn.Module
    inputs: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    output: Tensor
    levels: Sequence[Level]

    @classmethod
    def of(cls, library: Library, config: Config, levels: Sequence[Level], seed: int = 0) -> Trial:
        """Build a trial from the library's model with random weights. Raises `Unbuildable`."""
        model = library.build(config, seed)
        inputs = library.example(model, config)
        return cls(library, config, model, inputs, library.state_in_file(model), outputs(model, inputs), levels)

    @cached_property
    def memory(self) -> dict[str, str]:
        """Names in memory by names in files."""
        return memory_names(self.library, self.model)

    @cached_property
    def turned(self) -> set[str]:
        """Weights stored with the input axis first."""
        return {f"{name}.weight" for name, each in self.model.named_modules() if type(each).__name__ == "Conv1D"}

    def locate(self, name: str) -> tuple[int, str] | None:
        """Return the stage of a tensor and its name within a block; None outside the blocks."""
        for number, level in enumerate(self.levels):
            if hit := layer_number_pattern(level.layer).match(name):
                return number, name[hit.end() :]
        return None

    def run(self, config: Config, state: Mapping[str, Tensor], *, double: bool = False) -> Tensor:
        """Return the outputs of a file of such a model, in float64 if `double`. Raises `Unbuildable`."""
        model, given = self.library.reload(config, state), self.inputs
        if double:
            model, given = model.double(), {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
        return outputs(model, given)


def proven_cut(whole: Trial, level: Level, keep: Sequence[int]) -> str | None:
    """Return why a cut is wrong; None if it is proven.

    The file without the removed layers, once loaded, must compute what the model computes when those layers return
    their input, and that must differ from the output of the whole model.
    """
    gone = [i for i in range(level.depth) if i not in keep]
    try:
        with skip_blocks(whole.model, level, gone):
            by_hand = outputs(whole.model, whole.inputs)
    except Unbuildable as error:
        return f"the model does not run without layer {gone[0]} ({error})"
    unheard = level.taps and level.depth - 1 in gone and len(gone) == 1  # others may read an earlier layer only
    if not unheard and difference(whole.output, by_hand) < ALIVE:
        return f"dropping layer {gone[0]} changes nothing: its layers are not reached"
    shorter = whole.config | {level.key: len(keep)} | {key: [whole.config[key][i] for i in keep] for key in level.lists}
    shorter |= follow_layers(whole.config, COUNTERS, INDEX_LISTS, keep, level.depth)
    outer = dict(whole.library.outer)
    try:  # outputs are taken after the remaining layers
        move_taps(level.taps, (shorter, outer), keep, level.depth)
    except UsageError:  # too few layers are left for those that are read; a user's request for it is refused
        return None
    start, state = layer_number_pattern(level.layer), {}  # the file of the kept layers
    for name, tensor in whole.state.items():
        if not (hit := start.match(name)):
            state[name] = tensor
        elif int(hit[1]) in keep:
            state[level.layer.format(i=keep.index(int(hit[1]))) + name[hit.end() :]] = tensor
    try:
        cut = replace(whole.library, outer=outer).reload(shorter, state)
        gap = difference(by_hand, outputs(cut, whole.inputs))
    except Unbuildable as error:
        return f"without layer {gone[0]} it does not load ({error})"
    return None if gap <= EQUAL else f"without layer {gone[0]} outputs differ by {gap:.1e} of their spread"


def cuts(depth: int, group: int, first: int, last: int) -> list[list[int]]:
    """Return the layers kept in each cut to prove, with `first` and `last` ones; alternating layers go in groups."""
    if group > 1:
        return [[i for i in range(depth) if i // group != gone] for gone in range(depth // group)]
    alone = sorted({first, max(first, depth // 2), depth - 1 - last})
    one_less = [[j for j in range(depth) if j != i] for i in alone]
    both = {max(first, 1), depth - 2}
    return [*one_less, [j for j in range(depth) if j not in both]] if depth >= 5 else one_less


def period(config: Config) -> int:
    """Return the largest small number of a config that may be a period of layers (every third one, ...)."""
    words = ("every", "interval", "step", "period", "pattern", "freq", "offset", "layer_norm_num")
    return max(
        (v for k, v in config.items() if isinstance(v, int) and 1 < v <= 12 and any(w in k for w in words)), default=2
    )


def deeper(config: Config, level: Level, depth: int) -> Config:
    """Return the config at another depth; per-layer lists continue their pattern and keep their last entry."""
    like = [*(i % level.depth for i in range(depth - 1)), level.depth - 1]
    longer = dict(config) | {level.key: depth} | {key: [config[key][i] for i in like] for key in level.lists}
    return longer | of_single_layers(config, like)


@torch.no_grad()
def depth_trouble(
    library: Library,
    config: Config,
    level: Level,
    depth: int,
    seed: int = 0,
    group: int = 1,
    first: int = 0,
    last: int = 0,
) -> str | None:
    """Return why layers (in groups) after the `first` and before the `last` ones cannot be dropped from this stage.

    None if every cut at this depth was proven.
    """
    config, level = deeper(config, level, depth), replace(level, depth=depth)
    try:
        whole = Trial.of(library, config, [level], seed)
    except Unbuildable as error:
        return f"at depth {depth} no model of it runs: {error}"
    troubles = (proven_cut(whole, level, keep) for keep in cuts(depth, group, first, last))
    return next(filter(None, troubles), None)


def proven_depth(library: Library, config: Config, level: Level) -> tuple[str, int, int]:
    """Return why no layer of a stage can be dropped (empty if they can), and how many first and last layers must stay.

    Proven at two depths, the second over a whole period of kinds of layers.
    """
    if level.outside:
        return "a tensor outside the blocks has a part for every layer", 0, 0
    ways = ((0, 0), *((n, 0) for n in range(1, min(FIRST, level.depth - 2) + 1)), (0, 1))
    troubles = []
    for first, last in ways:
        why = depth_trouble(library, config, level, level.depth, first=first, last=last)
        if why is None:
            break
        troubles.append(why)
    else:
        return troubles[0], 0, 0
    depth = min(max(level.depth + 2, period(config) + 3), 13)
    again = depth_trouble(library, config, level, depth, seed=7, first=first, last=last)
    return (troubles[0] if troubles else again, 0, 0) if again else ("", first, last)


def droppable(library: Library, config: Config, level: Level) -> tuple[str, int, int, int]:
    """Return why no layer of a stage can be dropped (empty if they can), how many must stay, and the group size.

    The second and third value count the first and last layers that must stay. Groups larger than 1 are dropped as a
    whole: kinds of layers alternate by a rule that no list of the config shows.
    """
    trouble, first, last = proven_depth(library, config, level)
    if not trouble or level.outside or level.lists:
        return trouble, first, last, 1
    for group in sorted({2, 3, period(config)}):
        counts = (3, 4) if group < 5 else (2, 3)
        if not any(depth_trouble(library, config, level, group * count, count, group) for count in counts):
            return "", 0, 0, group
    return trouble, first, last, 1
