"""Stochastic depth (drop path, Huang et al., 2016) in a model that has places for it: every model of timm's kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leansurgeon.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

_PLACES = ("drop_path", "drop_path1", "drop_path2")


def apply(model: nn.Module, rate: float, family: str) -> None:
    """Drop the branches of the last block with probability `rate`, those of the first never, linearly between.

    Raises `UsageError` for a model that has no place for it.
    """
    from timm.layers import DropPath
    from torch import nn

    blocks: list[list[tuple[nn.Module, str]]] = []
    for module in model.modules():
        here = [name for name in _PLACES if isinstance(getattr(module, name, None), (nn.Identity, DropPath))]
        if here:
            blocks.append([(module, name) for name in here])
    if not blocks:
        raise UsageError(
            f"{family} models have no place for drop_path.", "Leave train.drop_path out; timm's models have one."
        )
    for index, places in enumerate(blocks):
        for module, name in places:
            setattr(module, name, DropPath(rate * index / max(1, len(blocks) - 1)))
