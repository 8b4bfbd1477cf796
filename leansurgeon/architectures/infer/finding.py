"""Results of inference about a family, as values that can be stored in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leansurgeon.reading.jsonfile import JsonObject


@dataclass(frozen=True)
class Part:
    """Where units of one kind are: axes by tensor name within a block."""

    axes: Mapping[str, tuple[tuple[int, str], ...]]  # template -> (axis, word)
    sinks: tuple[str, ...]


@dataclass(frozen=True)
class Stage:
    """One list of blocks. The `*_trouble` fields are reasons; an empty one means that everything was proven."""

    layer: str
    depth_key: str
    width_key: str
    lists: tuple[str, ...] = ()
    period: int = 1  # length of a cycle of alternating layers: whole cycles can be dropped
    width_at: tuple[str, int] | None = None  # a tensor of a block and its axis that has the width, if no key holds it
    heads_key: str | None = None
    kv_key: str | None = None
    head_dim_key: str | None = None
    mlp_key: str | None = None
    mlp_ratio: bool = False
    heads: Part | None = None
    mlp: Part | None = None
    spec: Mapping[str, Any] | None = None  # how our modelling file widens the attention
    heads_divide_width: bool = False
    projections: tuple[str, ...] = ()  # paths of output projections in the built model, `{i}` for the layer
    norm: str = "post"
    standard: bool = False  # heads are stored as q, k and v with head_dim entries each
    bases: str = ""  # pairs of "qkvo" that allow another basis per head
    buffers: tuple[str, ...] = ()  # tensors in files that are not parameters
    counters: tuple[str, ...] = ()  # config keys that count the first layers of a kind
    index_lists: tuple[str, ...] = ()  # config keys that list layers of a kind
    taps: tuple[str, ...] = ()  # config keys for the layers whose outputs others take
    stay: int = 0  # number of first layers that must stay
    stay_last: int = 0  # number of last layers that must stay
    depth_trouble: str = ""
    heads_trouble: str = ""
    halves_trouble: str = "was inferred, and heads of half the size were not tried"
    mlp_trouble: str = ""

    @property
    def troubles(self) -> dict[str, str]:
        """Why each number of the shape must not change."""
        return {"depth": self.depth_trouble, "heads": self.heads_trouble, "mlp_dim": self.mlp_trouble}


@dataclass(frozen=True)
class Finding:
    """A family as inferred on a small model with the user's flags."""

    model_type: str
    cls: str
    stages: tuple[Stage, ...]
    trouble: str = ""  # why nothing can be changed at all
    parameters: int = 0
    section: str = ""  # part of the config that describes the tower
    causal: bool = False
    buffers: tuple[str, ...] = ()  # tensors outside the blocks
    inputs: tuple[str, ...] = ()  # inputs that the small model was given

    @property
    def proven(self) -> dict[str, bool]:
        """What can change in every stage."""
        nothing = bool(self.trouble) or not self.stages
        return {
            kind: not nothing and not any(stage.troubles[kind] for stage in self.stages)
            for kind in ("depth", "heads", "mlp_dim")
        }

    def evidence(self) -> JsonObject:
        """Return the entry for `surgery.json`: that the family was inferred, on which model, and what was proven."""
        return {
            "inferred": True,
            "model_type": self.model_type,
            "class": self.cls,
            **({"tower": self.section} if self.section else {}),
            "proven_on_parameters": self.parameters,
            "proven_on_inputs": list(self.inputs),
            "proven": self.proven,
            "refused": [{"stage": stage.layer, **stage.troubles} for stage in self.stages],
        }
