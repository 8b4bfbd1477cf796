"""Holding kappa of attention through a training by a penalty, with heads and parameters as they are. For experiments
that ask whether kappa itself matters.

    loss = task + weight * mean over layers and samples of `above` or `below`

    above   sum over singular values of max(0, 1 - bound * sigma_i / sigma_1)^2: 0 where kappa is at most the bound
    below   max(0, ln(bound) - ln(kappa))^2: 0 where kappa is at least the bound

Kappa is that of `measure.kappa.blocks`: sigma_1 / sigma_k of what enters the output projection, for one sample. The
spectrum is taken in fp64.

Shape letters: B samples, N tokens, M heads * head_dim, R the smaller of N and M.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from leansurgeon.checkpoints.model import Loaded
from leansurgeon.errors import UsageError
from leansurgeon.hooks import Hooks
from leansurgeon.measure.data.batches import rows_of
from leansurgeon.measure.kappa import attentions
from leansurgeon.measure.kappa.blocks import fit, of_layer
from leansurgeon.measure.kappa.figures import ceiling
from leansurgeon.tasks import Score, Task
from leansurgeon.training.data.feed import Batch
from leansurgeon.training.recipe.settings import HoldKappa, Train

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
LEAVE_OUT = "Leave train.hold_kappa out."
Blocks = dict[int, Tensor]  # by layer


def check(train: Train, loaded: Loaded, *, sharing: bool) -> None:
    """Raises `UsageError` where this training cannot hold kappa: something else changes how blocks are computed or
    holds them twice, the model has no such blocks, or half precision cannot tell a kappa like this.
    """
    if train.hold_kappa is None:
        return
    others = ("ema", "lora", "compile", "activation_checkpointing")
    other = next((name for name in others if getattr(train, name)), None)
    other = f"train.{other}" if other else ("parallel: fsdp2" if sharing else None)
    if other:
        raise UsageError(f"train.hold_kappa does not go together with {other}.", "Leave one of the two out.")
    attentions.require(loaded, "train.hold_kappa")
    most = ceiling(DTYPES.get(train.precision, train.precision))
    if most is not None and train.hold_kappa.bound > most:
        raise UsageError(
            f"train.hold_kappa.bound is {train.hold_kappa.bound:g}, and {train.precision} cannot tell a kappa above "
            f"{most:g} from rounding.",
            "Use train.precision=fp32 or a lower bound.",
        )


class Penalty:
    """The penalty of one model in training: listen to a forward pass, then add what was heard to its score."""

    def __init__(self, settings: HoldKappa, loaded: Loaded, task: Task) -> None:
        self.settings, self.task, self.loaded = settings, task, loaded

    @contextmanager
    def listening(self) -> Iterator[Blocks]:
        """The block of every layer, as a forward pass within this context makes them."""
        blocks: Blocks = {}

        def keep(layer: int, module: nn.Module, args: Any) -> None:
            blocks.setdefault(layer, args[0])  # of the first run in a pass, as where kappa is measured

        with Hooks() as hooks:
            for layer, name in enumerate(self.loaded.projections):
                hooks.before(self.loaded.model.get_submodule(name), partial(keep, layer))
            yield blocks

    def added(self, score: Score, batch: Batch, blocks: Blocks) -> Score:
        """The score of the batch that these blocks belong to, with the penalty in `loss_sum`: times `loss_count`, so
        that it weighs the same for any number of micro batches and processes.
        """
        rows, mask, some = rows_of(batch), self.task.token_mask(batch), slice(self.settings.samples)
        terms = []
        for layer, name in enumerate(self.loaded.projections):
            if layer not in blocks or blocks[layer].shape[-2] < 2:
                what = "one token" if layer in blocks else "nothing"
                raise UsageError(f"Kappa cannot be held: '{name}' receives {what}.", LEAVE_OUT)
            if blocks[layer].requires_grad:  # frozen blocks cannot move
                block, real = fit(blocks[layer], of_layer(mask, layer), rows, name)
                terms.append(self._of(block[some], None if real is None else real[some]))
        penalty = torch.stack(terms).mean() if terms else score.loss_sum.new_zeros(())
        penalty = penalty.to(score.loss_sum)
        return score._replace(loss_sum=score.loss_sum + self.settings.weight * score.loss_count * penalty)

    def _of(self, block: Tensor, mask: Tensor | None) -> Tensor:
        """Mean over samples; NaN where a block has numbers that are not finite, for the guards of the loss to see."""
        distance = above if self.settings.kind == "most" else below
        finite_BNM = block.detach().isfinite()
        if mask is not None:
            finite_BNM = finite_BNM | ~mask[:, :, None]
        finite_B = finite_BNM.flatten(1).all(1)
        found_B = distance(*singular_values(block.masked_fill(~finite_B[:, None, None], 0), mask), self.settings.bound)
        return torch.where(finite_B.to(found_B.device), found_B, math.nan).mean().float()


def singular_values(block: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Of every sample the singular values (B, R) in fp64 with a gradient, descending, and how many of them there are
    with its real tokens, k (B,). `block` is (B, N, M), `mask` (B, N) with True at real tokens.
    """
    if block.device.type == "mps":  # knows no fp64
        block, mask = block.cpu(), None if mask is None else mask.cpu()
    counts_B = torch.full((len(block),), block.shape[1], device=block.device)
    if mask is not None:
        block, counts_B = block.masked_fill(~mask[:, :, None], 0), mask.sum(1)  # a row of zeros adds a zero
    sigma_BR = torch.linalg.svdvals(block.double())
    return sigma_BR, counts_B.clamp(max=sigma_BR.shape[1])


def above(sigma_BR: Tensor, k_B: Tensor, bound: float) -> Tensor:
    """By how much kappa is above `bound`, (B,): the sum over singular values of the squared share that each falls short
    of sigma_1 / bound. Its gradient stays bounded where kappa does not, as that of ln kappa would not. 0 for a block of
    zeros.
    """
    largest_B1 = sigma_BR[:, :1]
    real_BR = (torch.arange(sigma_BR.shape[1], device=sigma_BR.device) < k_B[:, None]) & (largest_B1 > 0)
    short_BR = (1 - bound * sigma_BR / _positive(largest_B1)).clamp(min=0)
    return torch.where(real_BR, short_BR, 0.0).square().sum(1)


def below(sigma_BR: Tensor, k_B: Tensor, bound: float) -> Tensor:
    """By how much kappa is below `bound`, (B,): the square of ln(bound) - ln(kappa) where that is positive. 0 for a
    block without full rank.
    """
    last_B = sigma_BR.gather(1, (k_B - 1).clamp(min=0)[:, None])[:, 0]
    missing_B = math.log(bound) + _positive(last_B).log() - _positive(sigma_BR[:, 0]).log()
    return torch.where(last_B > 0, missing_B.clamp(min=0), 0.0).square()


def _positive(values: Tensor) -> Tensor:
    """1 in the place of zero: for a division or logarithm whose result is not taken there."""
    return torch.where(values > 0, values, 1.0)
