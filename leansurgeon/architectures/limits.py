"""What of an architecture may not change, and the config keys that follow the layers that stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from leansurgeon.architectures.tensors import Blocks, Config, Tensor
from leansurgeon.errors import UnsupportedModel
from leansurgeon.shape import Shape

NUMBERS = {"depth": ("depth",), "heads": ("heads", "head_dim", "kv_heads"), "mlp_dim": ("mlp_dim",)}
CANNOT = {"depth": "Layers cannot be dropped", "heads": "Heads cannot change", "mlp_dim": "The MLP cannot change"}
CAN = {"depth": "layers can be dropped", "heads": "heads can change", "mlp_dim": "the MLP can change"}
ALL_HEADS = "its query and key norms run over all heads"


class Limited(Protocol):
    """The part of an `Architecture` that is looked at here."""

    @property
    def block(self) -> tuple[Tensor, ...]:
        """Tensors of a layer."""
        ...

    @property
    def stages(self) -> tuple[Blocks, ...]:
        """The same for every stage of its own."""
        ...

    @property
    def refused(self) -> Mapping[str, str]:
        """What the declaration says may not change, and why."""
        ...


def refusals(architecture: Limited, *, keeps: bool = True) -> dict[str, str]:
    """What may not change, and why: what a declaration says, and what follows from the roles of its tensors where the
    result `keeps` what the model has learned.
    """
    blocks = (architecture.block, *(stage.block for stage in architecture.stages))
    over_all = keeps and any(tensor.role == "qk_norm_all" for block in blocks for tensor in block)
    return ({"heads": ALL_HEADS} if over_all else {}) | dict(architecture.refused)


def check_allowed(name: str, refused: Mapping[str, str], now: Shape, shape: Shape) -> None:
    """Raises `UnsupportedModel` where a number that may not change does, with the reason and with what may."""
    for kind, reason in refused.items():
        pairs = [(a, b) for a, b in zip(now.stages, shape.stages, strict=True)]
        if any(getattr(a, number) != getattr(b, number) for a, b in pairs for number in NUMBERS[kind]):
            able = " and ".join(text for other, text in CAN.items() if other not in refused)
            raise UnsupportedModel(
                f"{CANNOT[kind]} in this {name}: {reason}.", f"{able[:1].upper()}{able[1:]}." if able else None
            )


def followed(
    c: Config, counters: Sequence[str], index_lists: Sequence[str], layers: Sequence[int], depth: int
) -> dict[str, object]:
    """What keys that count the first layers of a kind, or list layers by number, say of the kept `layers`."""
    found: dict[str, object] = {}
    for key in counters:
        if isinstance(c.get(key), int) and c[key] < depth:
            found[key] = sum(i < c[key] for i in layers)
    for key in index_lists:
        if isinstance(c.get(key), list):
            found[key] = [layers.index(i) for i in c[key] if i in layers]
    return found
