"""Dropout at the rate that a recipe asks for, for the time of one training; the model's config keeps its own."""

from __future__ import annotations

from torch import nn

from leansurgeon.errors import UsageError


def apply(model: nn.Module, rate: float, family: str) -> None:
    """Let every `nn.Dropout`, and every module that keeps a dropout rate for its attention, drop with `rate`.

    Raises `UsageError` for a model that has none, unless it asks for none.
    """
    has_dropout = False
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p, has_dropout = rate, True
        # Fused attention takes its rate as a number, which modules keep as `dropout`, `attention_dropout`, ...
        for name, value in vars(module).items():
            if "dropout" in name and type(value) is float:
                setattr(module, name, rate)
                has_dropout = True
    if rate and not has_dropout:
        raise UsageError(f"{family} models have no place for dropout.", "Leave train.dropout out.")
