"""timm as a library for inference: small random models by the arguments of their constructors."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from leansurgeon.architectures.infer.library import UNBUILT, UNLOADED, Library, perturb, raising
from leansurgeon.architectures.infer.timm_models import arguments
from leansurgeon.architectures.tensors import Config

BATCH = 2


@dataclass(frozen=True)
class TimmLibrary(Library):
    """One entry point of timm.

    Configs are flat (`arguments.flatten`), with the entry point as `model_type`. `side` is the size of the square test
    images, and `extra` holds arguments of the entry point besides the numbers.
    """

    name: str = ""
    side: int = 224
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> TimmLibrary:
        """Create the library for a flat config."""
        name = config["model_type"]
        built = arguments.build(name, args_of(config))
        return cls(type(built), name=name)

    def build(self, config: Mapping[str, Any], seed: int | None = 0, device: str = "cpu") -> nn.Module:
        """Build a model in eval mode, fp32, with random weights (`seed=None` keeps timm's own).

        Raises `Unbuildable`.
        """
        with raising(UNBUILT):
            model = arguments.build(self.name, {**args_of(config), **self.extra}, device).float().eval()
        if seed is not None:
            perturb(model, seed)
        return model

    def state_in_file(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in model.state_dict().items()}

    def reload(self, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> nn.Module:
        """Load such a file as `timm.create_model` does for a folder. Raises `Unbuildable`."""
        model = self.build(config, None)
        with raising(UNLOADED):
            model.load_state_dict(dict(state), strict=True)
        return model

    def example(self, model: nn.Module, config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
        """Return noise images under the name of the forward pass's first argument."""
        first = next(iter(inspect.signature(model.forward).parameters))
        generator = torch.Generator().manual_seed(seed)
        channels = config.get("in_chans") or 3
        return {first: torch.randn(BATCH, channels, self.side, self.side, generator=generator)}


def args_of(config: Mapping[str, Any]) -> Config:
    """Return the constructor arguments of a flat config."""
    return arguments.unflatten({k: v for k, v in config.items() if k != "model_type"})
