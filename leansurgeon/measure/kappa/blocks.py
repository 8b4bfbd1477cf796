"""Condition number of attention blocks (kappa), after Saratchandran et al., "Leaner Transformers" (arXiv 2505.20802).

For one layer and one sample with N real tokens, the block A = [A_1 ... A_h] of shape (N, heads * head_dim) is what
enters the output projection. With k = min(N, heads * head_dim), kappa = sigma_1 / sigma_k. The paper leaves open what
to average over; here kappa is taken per sample, over unmasked tokens (class token kept), from an fp32 forward, with
the spectrum in fp64.

A change of basis within the heads (W_v -> R W_v, W_o -> W_o R^-1) changes this kappa and not the model. So
`measure_blocks` takes the kappa of A W_o, what the block adds to the stream, along with it; `invariant` adds those of
the weights and of the Jacobian.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Protocol

import torch
from torch import Tensor

from leansurgeon.architectures.base import Architecture, Config
from leansurgeon.checkpoints.model import Loaded
from leansurgeon.errors import LeanSurgeonError
from leansurgeon.hooks import Hooks
from leansurgeon.measure.costs.precision import at_rest
from leansurgeon.measure.data import inputs
from leansurgeon.measure.data.batches import first_rows, rows_of
from leansurgeon.measure.kappa.figures import (
    Conditioning,
    LayerKappa,
    ModelKappa,
    ceiling,
    over_layers,
    over_samples,
    summarise,
)
from leansurgeon.measure.kappa.spectrum import conditioning

# (batch, tokens) with True at real tokens, None where all are; a list where stacks of layers read different tokens.
Mask = Tensor | None | list[Tensor | None]


class Measured(Protocol):
    """A model that can be measured: `checkpoints.model.Loaded`, or what has the same parts."""

    model: torch.nn.Module
    architecture: Architecture
    config: Config

    @property
    def projections(self) -> list[str]:
        """Module names of the output projections in the order of the layers."""
        ...

    def forward(self, batch: dict[str, Tensor]) -> object:
        """One pass over a batch; what comes out is not looked at."""
        ...


def headless(loaded: Loaded, done: Callable[[], None] = lambda: None) -> Measured:
    """The model without its wish for logits: encoders without a head have kappa, too. Each pass calls `done`."""

    def forward(batch: dict[str, Tensor]) -> Tensor:
        done()
        return inputs.answer(loaded, batch)

    parts = {name: getattr(loaded, name) for name in ("model", "architecture", "config", "projections")}
    return SimpleNamespace(**parts, forward=forward)


def measure_blocks(
    loaded: Measured,
    batches: Iterable[dict[str, Tensor]],
    token_mask: Callable[[dict[str, Tensor]], Mask],
    samples: int,
    *,
    half: torch.dtype | None = None,
) -> ModelKappa:
    """Kappa of every layer of a model on the first `samples` samples of `batches`: values that JSON can hold.

    `token_mask` gives a batch's mask, or a list with one for every projection.

    The forward is fp32 without autocast (or under autocast of `half`), in eval mode; every
    module's mode is put back afterwards. Where a projection runs more than once in a forward (two inputs, shared
    layers) its first run counts, and where it sees more rows than the batch, the first ones.

    Layers are numbered from 1. `mean` and `geometric_mean` leave rank-deficient samples out and `deficient` counts
    them; `median` and `worst` (over samples) count them as infinite and are null where that shows, with
    `median_lower_bound` and `lower_bound` in their place; `median_interval` is the bootstrap's (`samples.interval`).
    `output` has the same of A W_o without its bias; `capped` says that the dtype of the forward made kappa too small.
    In `model`, `mean` is the mean of the layers' means (the paper's figure), `median` the median of the layers'
    medians and `worst` the largest of the layers' medians.

    Raises `Diverged` on values that are not finite and `LeanSurgeonError` when mask and block disagree or there is
    nothing to measure.
    """
    listener = _Listener(loaded.projections)
    taken = 0
    device = next(loaded.model.parameters()).device
    # Not inference_mode: buffers that a model caches in its forward (rotary tables) must stay usable in training.
    with torch.no_grad(), at_rest(loaded.model, device, half), Hooks() as hooks:
        for layer, name in enumerate(loaded.projections):
            hooks.after(loaded.model.get_submodule(name), partial(listener.hear, layer))
        for batch in batches:
            if taken >= samples:
                break
            batch = first_rows(batch, samples - taken, device)
            rows = rows_of(batch)
            listener.begin(token_mask(batch), rows)
            loaded.forward(batch)
            taken += rows
    return listener.document(taken)


class _Listener:
    """Hooks on the output projections: the conditioning of what enters each, and of what it adds to the stream."""

    def __init__(self, projections: list[str]) -> None:
        self.projections = projections
        self.blocks: list[list[Conditioning]] = [[] for _ in projections]
        self.outputs: list[list[Conditioning]] = [[] for _ in projections]
        self.dtypes: set[torch.dtype] = set()

    def begin(self, mask: Mask, rows: int) -> None:
        """The next forward pass is that of a batch of `rows` samples."""
        self.mask, self.rows, self.heard = mask, rows, set()

    def hear(self, layer: int, module: torch.nn.Module, args: tuple, output: Tensor) -> None:
        """A forward hook of the projection of `layer`; only its first run in a pass counts."""
        if layer in self.heard:
            return
        self.heard.add(layer)
        name = self.projections[layer]
        block, mask = fit(args[0], of_layer(self.mask, layer), self.rows, name)
        self.dtypes.add(block.dtype)
        self.blocks[layer] += conditioning(block, mask)
        bias = getattr(module, "bias", None)
        # fp32 where autocast's output meets the bias; what can be told of it is what its own dtype held.
        plain = output if bias is None else (output - bias).to(output.dtype)
        added, _ = fit(plain, mask, self.rows, name)
        self.outputs[layer] += conditioning(added, mask, most=block.shape[-1], centred=False)

    def document(self, samples: int) -> ModelKappa:
        """What was heard, over all `samples`. Raises `LeanSurgeonError` where a layer heard nothing."""
        silent = [name for name, layer in zip(self.projections, self.blocks, strict=True) if not layer]
        if not self.blocks or silent:
            which = f"; '{silent[0]}' saw none" if silent else ""
            raise LeanSurgeonError(f"Kappa needs at least one sample with a real token in every layer{which}.")
        forward = ", ".join(sorted(str(d).removeprefix("torch.") for d in self.dtypes))
        layers = [summarise(layer, i) for i, layer in enumerate(self.blocks, 1)]
        for layer, added in zip(layers, self.outputs, strict=True):
            layer["output"] = over_samples(added)
            layer["capped"] = capped(layer, forward)
        return {
            "samples": samples,
            "tokens": sum(c.tokens for c in self.blocks[0]),
            "forward_dtype": forward,
            "layers": layers,
            "model": over_layers(layers),
        }


def of_layer(mask: Mask, layer: int) -> Tensor | None:
    """The mask of one projection, counted from 0."""
    return mask[layer] if isinstance(mask, list) else mask


def capped(layer: LayerKappa, forward: str) -> bool:
    """Whether a half-precision forward has made a layer's kappa too small to be taken as measured."""
    limit, shown = ceiling(forward), layer["median"] or layer["median_lower_bound"] or 0.0
    return limit is not None and shown > limit


def fit(block: Tensor, mask: Tensor | None, rows: int, name: str) -> tuple[Tensor, Tensor | None]:
    """The block (rows, N, M) that belongs to the batch, and its mask; refuses a mask that speaks of other tokens.

    A grid of tokens (rows, height, width, M) counts as height * width tokens.
    """
    if block.dim() == 4:
        block = block.flatten(1, 2)
    if block.dim() != 3:
        raise LeanSurgeonError(
            f"'{name}' receives a {block.dim()}-dimensional tensor; kappa needs (batch, tokens, inner width)."
        )
    block = block[:rows]
    if mask is not None and tuple(mask.shape) != tuple(block.shape[:2]):
        raise LeanSurgeonError(
            f"The token mask is {list(mask.shape)}, but '{name}' receives {list(block.shape[:2])} (samples, tokens)."
        )
    return block, mask
