"""The moving average of the weights: timm's ModelEmaV3 beside the model that is trained."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from leansurgeon.training.settings import Ema


class Average:
    """The average of `loaded.model`; `loaded` here is the same thing with the averaged model in it."""

    def __init__(self, loaded: Any, ema: Ema) -> None:
        from timm.utils import ModelEmaV3

        self._ema = ModelEmaV3(loaded.model, decay=ema.decay, use_warmup=ema.warmup)
        self._ema.requires_grad_(False)
        self.loaded = copy.copy(loaded)
        self.loaded.model = self._ema.module

    @property
    def model(self) -> nn.Module:
        return self._ema.module

    def update(self, model: nn.Module, done: int) -> None:
        """Take in the weights after `done` steps. The first update copies them; no state but the weights is kept."""
        self._ema.update(model, step=done)
