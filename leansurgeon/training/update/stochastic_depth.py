"""Stochastic depth (drop path, Huang et al., 2016) in a model that has places for it: every model of timm's kind.

Rates are those that timm's own models give themselves for `drop_path_rate`, since papers name that number alone:
linear from 0 at the first block to the rate at the last, unless the family's declaration says otherwise
(`timm_models.DropPath`). Classes are known by their names: a model that was cut is still made of timm's.
"""

from __future__ import annotations

from torch import nn

from leansurgeon import architectures
from leansurgeon.errors import UsageError

_PLACES = ("drop_path", "drop_path1", "drop_path2", "drop_path3")
_TIMM = [family.timm for family in architectures.known().values() if family.timm]
_CONSTANT = {timm.kind for timm in _TIMM if timm.drop_path.constant}
_BESIDE = {name for timm in _TIMM for name in timm.drop_path.beside}
_SPARED = {name for timm in _TIMM for name in timm.drop_path.spared}
_HALVES = {name for timm in _TIMM for name in timm.drop_path.halves}


def apply(model: nn.Module, rate: float, family: str) -> None:
    """Drop the branches of the last block with probability `rate`, those of the first never, linearly between; or as
    timm does it where that is otherwise (see above).

    Raises `UsageError` for a model that has no place for it.
    """
    from timm.layers import DropPath

    blocks = _blocks(model)
    if not blocks:
        raise UsageError(
            f"{family} models have no place for drop_path.", "Leave train.drop_path out; timm's models have one."
        )
    # Ours with heads of another size are subclasses of timm's.
    constant = any(kind.__name__ in _CONSTANT for module in model.modules() for kind in type(module).__mro__)
    for index, modules in enumerate(blocks):
        share = 1.0 if constant else index / max(1, len(blocks) - 1)
        for module in modules:
            if type(module).__name__ not in _SPARED:
                for name in _places(module):
                    setattr(module, name, DropPath(rate * share))


def _blocks(model: nn.Module) -> list[list[nn.Module]]:
    """The modules with places for drop path, in the order of the depth, those of one block together."""
    blocks: dict[str, list[nn.Module]] = {}
    for path, module in model.named_modules():
        kind = type(module).__name__
        if kind not in _BESIDE and _places(module):
            blocks.setdefault(path.rpartition(".")[0] if kind in _HALVES else path, []).append(module)
    return list(blocks.values())


def _places(module: nn.Module) -> list[str]:
    from timm.layers import DropPath

    return [name for name in _PLACES if isinstance(getattr(module, name, None), (nn.Identity, DropPath))]
