"""Locate every attention of a model and the slices of its heads: where importance is read and heads are switched off.

The input of an output projection is the heads' outputs side by side, so its columns `h * head_dim .. (h + 1) *
head_dim` are head h, in every library and for every declared kind of attention. A head is switched off by zeroing its
slice there (Michel et al., arXiv 1905.10650): the bias of the projection stays, and nothing is copied or rebuilt.

`nn.MultiheadAttention` uses its projection's weight without calling it, so no hook would ever fire; none of the
declared families uses it.

Letters: B samples, T tokens, H heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from leansurgeon.checkpoints.model import Loaded
from leansurgeon.errors import UnsupportedModel
from leansurgeon.hooks import Hooks


@dataclass(frozen=True)
class Site:
    """One attention of one layer.

    `layer` counts within its stage and `index` through all stages, both from 0; `group` distinguishes the attentions of
    a layer. `kind` is self, or encoder, decoder and cross in an encoder-decoder. `shared` query heads use one key/value
    head. `in_step` means that head h of every layer of the stage must be kept or dropped together.
    """

    module: str
    kind: str
    stage: int
    layer: int
    index: int
    group: int
    heads: int
    head_dim: int
    shared: int = 1
    in_step: bool = False

    @property
    def groups(self) -> int:
        """Number of key/value groups, which a checkpoint loses as a whole (without shared keys, the number of
        heads).
        """
        return self.heads // self.shared


def sites(loaded: Loaded) -> list[Site]:
    """Return the attentions of a loaded model, in the order of its layers."""
    arch = loaded.architecture
    shape = arch.shape(loaded.config)
    stacks = any(blocks.keys for blocks in arch.stages) and len(shape.stages) > 1
    places = []
    names = iter(loaded.projections)
    index = 0
    for s, stage in enumerate(shape.stages):
        blocks = arch.blocks(s)
        # A single key/value head cannot be dropped; then single query heads can.
        shared = stage.heads // stage.kv_heads if stage.kv_heads > 1 else 1
        for layer in range(stage.depth):
            for group in range(len(blocks.projection)):
                kind = "self" if not group else f"self {group + 1}"
                if stacks:
                    kind = "encoder" if s == 0 else "cross" if group else "decoder"
                at, size = (s, layer, index, group), (stage.heads, stage.head_dim)
                places.append(Site(next(names), kind, *at, *size, shared, blocks.in_step(group)))
            index += 1
    return places


def heads_of(x: Tensor, site: Site, rows: int) -> Tensor:
    """Reshape the input of a projection to (B, T, H, D). Windows and grids of tokens, which libraries fold into the
    batch sample by sample, become tokens of their sample.

    Raises `UnsupportedModel` if the input is not heads side by side.
    """
    if x.shape[-1] != site.heads * site.head_dim or x.numel() % (rows * x.shape[-1]):
        raise UnsupportedModel(
            f"'{site.module}' receives {list(x.shape)}, which is not {site.heads} heads of {site.head_dim} for each "
            f"of {rows} samples.",
            "Head importance cannot be read here.",
        )
    return x.reshape(rows, -1, site.heads, site.head_dim)


def split(values: np.ndarray, places: Sequence[Site]) -> list[np.ndarray]:
    """Split one number per head of the whole model, (sum of heads,), into one array per site."""
    return np.split(values, np.cumsum([site.heads for site in places])[:-1])


def count(places: Sequence[Site]) -> int:
    """Return the number of heads of all sites."""
    return sum(site.heads for site in places)


@contextmanager
def hook_sites(
    model: nn.Module, places: Sequence[Site], change: Callable[[int, Tensor], Tensor | None]
) -> Iterator[None]:
    """Call `change(i, x)` with the input of projection i within the context; a returned tensor replaces it."""

    def hook(i: int, _module: nn.Module, args: tuple) -> tuple | None:
        new = change(i, args[0])
        return None if new is None else (new, *args[1:])

    with Hooks() as hooks:
        for i, site in enumerate(places):
            hooks.before(model.get_submodule(site.module), partial(hook, i))
        yield


@contextmanager
def switch_off_heads(model: nn.Module, places: Sequence[Site], keep: np.ndarray) -> Iterator[None]:
    """Switch off the heads where `keep` (sum of heads,) is false, within the context."""
    parts = split(np.asarray(keep, bool), places)
    cut = [i for i, part in enumerate(parts) if not part.all()]
    masks = {}

    def change(n: int, x: Tensor) -> Tensor:
        site, i = places[cut[n]], cut[n]
        if i not in masks:
            masks[i] = torch.from_numpy(parts[i].repeat(site.head_dim)).to(x.device)
        return x * masks[i].to(x.dtype)

    with hook_sites(model, [places[i] for i in cut], change):
        yield
