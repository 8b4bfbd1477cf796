"""Holding kappa of attention through a training by a penalty, with heads and parameters as they are. For experiments
that ask whether kappa itself matters.

    loss = task + weight * mean over layers and samples of how far kappa is beyond the bound (`above`, `below`)

Kappa is that of `measure.kappa.blocks`: sigma_1 / sigma_k of what enters the output projection, for one sample. The
spectrum is taken in fp64.

Shape letters: B samples, N tokens, M heads * head_dim, R the smaller of N and M.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from leansurgeon.checkpoints.model import Loaded
from leansurgeon.errors import UsageError
from leansurgeon.measure.data.batches import rows_of
from leansurgeon.measure.kappa.blocks import fit, of_layer
from leansurgeon.tasks import Score, Task
from leansurgeon.training.data.feed import Batch
from leansurgeon.training.recipe.settings import HoldKappa, Train


def check(train: Train, *, sharing: bool) -> None:
    """Raises `UsageError` where this training cannot hold kappa: something else changes how blocks are computed, or
    holds them twice.
    """
    if train.hold_kappa is None:
        return
    others = ("ema", "lora", "compile", "activation_checkpointing")
    other = next((name for name in others if getattr(train, name)), None)
    other = f"train.{other}" if other else ("parallel: fsdp2" if sharing else None)
    if other:
        raise UsageError(f"train.hold_kappa does not go together with {other}.", "Leave one of the two out.")


class Penalty:
    """The penalty of one model in training; in evaluation it is silent."""

    def __init__(self, settings: HoldKappa, loaded: Loaded, task: Task) -> None:
        self.settings, self.task, self.names = settings, task, loaded.projections
        self._blocks: dict[int, Tensor] = {}
        for layer, name in enumerate(self.names):
            loaded.model.get_submodule(name).register_forward_pre_hook(partial(self._keep, layer))

    def _keep(self, layer: int, module: nn.Module, args: Any) -> None:
        """A block of the first run of its projection in a forward counts, as it does where kappa is measured."""
        if module.training and torch.is_grad_enabled():
            self._blocks.setdefault(layer, args[0])

    def added(self, score: Score, batch: Batch) -> Score:
        """The score of a batch that the model has just seen, with the penalty in `loss_sum`: times `loss_count`, so
        that it weighs the same for any number of micro batches and processes.
        """
        blocks, self._blocks = self._blocks, {}
        rows = rows_of(batch)
        mask = self.task.token_mask(batch)
        terms = []
        for layer, block in blocks.items():
            here, real = fit(block, of_layer(mask, layer), rows, self.names[layer])
            some = slice(self.settings.samples)
            terms.append(self._of(here[some], None if real is None else real[some]))
        penalty = torch.stack(terms).mean() if terms else score.loss_sum.new_zeros(())
        return score._replace(loss_sum=score.loss_sum + self.settings.weight * score.loss_count * penalty)

    def _of(self, block: Tensor, mask: Tensor | None) -> Tensor:
        """Mean over samples of the distance from the bound."""
        distance = above if self.settings.kind == "most" else below
        return distance(*singular_values(block, mask), self.settings.bound).mean().float()


def singular_values(block: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Of every sample the singular values (B, R) in fp64 with a gradient, descending, and how many of them there are
    with its real tokens, k (B,). `block` is (B, N, M), `mask` (B, N) with True at real tokens.
    """
    counts_B = torch.full((len(block),), block.shape[1], device=block.device)
    if mask is not None:
        block, counts_B = block * mask[:, :, None], mask.sum(1)  # a row of zeros adds a singular value of zero
    sigma_BR = torch.linalg.svdvals(block.double())
    return sigma_BR, counts_B.clamp(max=sigma_BR.shape[1])


def above(sigma_BR: Tensor, k_B: Tensor, bound: float) -> Tensor:
    """By how much kappa is above `bound`, (B,): the sum over singular values of the squared share that each falls short
    of sigma_1 / bound. Its gradient stays bounded where kappa does not, as that of ln kappa would not.
    """
    real_BR = torch.arange(sigma_BR.shape[1], device=sigma_BR.device) < k_B[:, None]
    short_BR = (1 - bound * sigma_BR / _positive(sigma_BR[:, :1])).clamp(min=0)
    return torch.where(real_BR, short_BR, 0.0).square().sum(1)


def below(sigma_BR: Tensor, k_B: Tensor, bound: float) -> Tensor:
    """By how much kappa is below `bound`, (B,): the square of ln(bound) - ln(kappa) where that is positive."""
    last_B = sigma_BR.gather(1, (k_B - 1).clamp(min=0)[:, None])[:, 0]
    missing_B = math.log(bound) + _positive(last_B).log() - _positive(sigma_BR[:, 0]).log()
    return torch.where(last_B > 0, missing_B.clamp(min=0), 0.0).square()


def _positive(values: Tensor) -> Tensor:
    """As they are, but 1 for zero: what is divided by it is zero as well, or not looked at."""
    return torch.where(values > 0, values, 1.0)
