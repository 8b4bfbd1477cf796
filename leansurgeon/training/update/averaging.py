"""The moving average of the weights, with the decay of timm's ModelEmaV3, beside the model that is trained."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from leansurgeon.checkpoints.model import Loaded
from leansurgeon.training.processes import shards
from leansurgeon.training.recipe.settings import Ema


class Average:
    """The average of `loaded.model`; `loaded` here is the same thing with the averaged model in it."""

    def __init__(self, loaded: Loaded, ema: Ema) -> None:
        from timm.utils import ModelEmaV3

        self._ema = ModelEmaV3(loaded.model, decay=ema.decay, use_warmup=ema.warmup)
        self._ema.requires_grad_(False)
        self.loaded = copy.copy(loaded)
        self.loaded.model = self._ema.module

    @property
    def model(self) -> nn.Module:
        return self._ema.module

    def update(self, model: nn.Module, done: int) -> None:
        """Take in the weights after `done` steps. The first update copies them; no state but the weights is kept.

        Not timm's `update`: that one goes by names, so that a tied weight, which has two, moves twice as fast; and it
        takes no tensors in parts (`shards`).
        """
        share = 1 - self._ema.get_decay(done)
        means, values = _tensors(self.model), _tensors(model)
        floating = [name for name, mean in means.items() if mean.is_floating_point()]
        with torch.no_grad():
            torch._foreach_lerp_([means[name] for name in floating], [values[name] for name in floating], share)
            for name in means.keys() - set(floating):
                means[name].copy_(values[name])


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, each once; of those in parts the part of this process."""
    by_name = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: shards.local(tensor) for name, tensor in by_name.items()}
