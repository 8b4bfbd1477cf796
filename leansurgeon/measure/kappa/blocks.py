"""Condition number of attention blocks (kappa), after Saratchandran et al., "Leaner Transformers" (arXiv 2505.20802).

For one layer and one sample with N real tokens, the block A = [A_1 ... A_h] of shape (N, heads * head_dim) is the input
of the output projection. With k = min(N, heads * head_dim), kappa = sigma_1 / sigma_k. The paper does not say what to
average over; here kappa is computed per sample, over unmasked tokens (class token included), from an fp32 forward, with
the spectrum in fp64.

A change of basis within the heads (W_v -> R W_v, W_o -> W_o R^-1) changes this kappa and not the model. So
`measure_blocks` also computes the kappa of A W_o, what the block adds to the stream; `study` adds those of the weights
and of the Jacobian.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from leansurgeon.checkpoints.model import Loaded
from leansurgeon.errors import LeanSurgeonError
from leansurgeon.hooks import Hooks
from leansurgeon.measure.costs.precision import at_rest
from leansurgeon.measure.data.batches import Batch, first_rows, rows_of
from leansurgeon.measure.kappa.figures import over_layers, over_samples, summarise
from leansurgeon.measure.kappa.spectrum import conditioning
from leansurgeon.reading.jsonfile import JsonObject

# (batch, tokens) with True at real tokens, None if all are; a list if stacks of layers read different tokens.
Mask = Tensor | None | list[Tensor | None]
TokenMask = Callable[[Batch], Mask]


def measure_blocks(
    loaded: Loaded,
    batches: Iterable[Batch],
    token_mask: TokenMask,
    samples: int,
) -> JsonObject:
    """Measure the kappa of every layer of a model on the first `samples` samples of `batches`. Returns values for JSON.

    `token_mask` returns a batch's mask, or a list with one for every projection.

    The forward is fp32 without autocast, in eval mode; every module's mode is restored afterwards. If a projection runs
    more than once in a forward (two inputs, shared layers) its first run counts, and if it sees more rows than the
    batch, the first ones.

    Layers are numbered from 1. `mean` and `geometric_mean` exclude rank-deficient samples, which `deficient` counts;
    `median` and `worst` (over samples) treat them as infinite and are null if the result is infinite, with
    `median_lower_bound` and `lower_bound` in their place; `median_interval` is a bootstrap interval
    (`figures.interval`). `output` has the same for A W_o without its bias.

    In `model`, `mean` is the mean of the layers' means (the paper's figure), `median` the median of the layers' medians
    and `worst` the largest of the layers' medians.

    Raises `Diverged` on values that are not finite and `LeanSurgeonError` if mask and block disagree or there is
    nothing to measure.
    """
    names = loaded.projections
    blocks = [[] for _ in names]
    outputs = [[] for _ in names]
    dtypes = set()
    taken, device = 0, next(loaded.model.parameters()).device

    def hear(layer: int, module: torch.nn.Module, args: tuple, output: Tensor) -> None:
        """Record the conditioning of a projection's input, and of its output, on its first run of a pass."""
        if layer in heard:
            return
        heard.add(layer)
        block, real = fit(args[0], of_layer(mask, layer), rows, names[layer])
        dtypes.add(str(block.dtype).removeprefix("torch."))
        blocks[layer] += conditioning(block, real)
        bias = getattr(module, "bias", None)
        added, _ = fit(output if bias is None else output - bias, real, rows, names[layer])
        outputs[layer] += conditioning(added, real, most=block.shape[-1], centred=False)

    # Not inference_mode: buffers that a model caches in its forward (rotary tables) must stay usable in training.
    with torch.no_grad(), at_rest(loaded.model, device), Hooks() as hooks:
        for layer, name in enumerate(names):
            hooks.after(loaded.model.get_submodule(name), partial(hear, layer))
        for batch in batches:
            if taken >= samples:
                break
            batch = first_rows(batch, samples - taken, device)
            mask, rows, heard = token_mask(batch), rows_of(batch), set()
            loaded.forward(batch)
            taken += rows
    silent = [name for name, layer in zip(names, blocks, strict=True) if not layer]
    if not blocks or silent:
        which = f"; '{silent[0]}' saw none" if silent else ""
        raise LeanSurgeonError(f"Kappa needs at least one sample with a real token in every layer{which}.")
    layers = [summarise(layer, i) for i, layer in enumerate(blocks, 1)]
    for layer, added in zip(layers, outputs, strict=True):
        layer["output"] = over_samples(added)
    return {
        "samples": taken,
        "tokens": sum(c.tokens for c in blocks[0]),
        "forward_dtype": ", ".join(sorted(dtypes)),
        "layers": layers,
        "model": over_layers(layers),
    }


def of_layer(mask: Mask, layer: int) -> Tensor | None:
    """Return the mask of one projection, counted from 0."""
    return mask[layer] if isinstance(mask, list) else mask


def fit(block: Tensor, mask: Tensor | None, rows: int, name: str) -> tuple[Tensor, Tensor | None]:
    """Return the block (rows, N, M) of the batch, and its mask; raises `LeanSurgeonError` if the mask is for other
    tokens.

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
