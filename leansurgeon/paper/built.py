"""Count the parameters of a model that the library builds on the meta device: shapes without numbers. Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from leansurgeon.architectures.base import Architecture, Config
from leansurgeon.checkpoints.model import initialise

FILLS = {"clamp_", "erfinv_", "fill_", "mul_", "add_", "normal_", "uniform_", "zero_", "zeros_", "ones_", "constant_"}


class Unfilled(TorchFunctionMode):
    """Leaves out the drawing of numbers: the meta device has none, and clamping nothing takes torch seconds."""

    def __torch_function__(
        self, func: Callable, types: tuple[type, ...], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if args and getattr(func, "__name__", "") in FILLS and getattr(args[0], "is_meta", False):
            return args[0]
        return func(*args, **(kwargs or {}))


def built_count(config: Config, architecture: Architecture) -> int:
    """Parameters of the model that the library builds for `config`, tied ones once.

    timm 1.0.20 cannot build every model on the meta device; there the weights exist for a moment.
    """
    try:
        with torch.device("meta"), Unfilled():
            model = initialise(config, architecture, seed=0)
    except (RuntimeError, NotImplementedError):
        model = initialise(config, architecture, seed=0)
    return sum(p.numel() for p in model.parameters())
