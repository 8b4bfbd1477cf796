"""What inference has found of a family, as values that can be kept in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Part:
    """Units of one kind: the config's keys for them, and where they stand: axes by tensor name within a block."""

    key: str
    axes: Mapping[str, tuple[tuple[int, str], ...]]  # template -> (axis, word)
    sinks: tuple[str, ...]


@dataclass(frozen=True)
class Stage:
    """One list of blocks. Troubles are sentences; an empty one says that everything was proven."""

    layer: str
    modules: str
    depth_key: str
    width_key: str
    lists: tuple[str, ...] = ()
    heads_key: str | None = None
    kv_key: str | None = None
    head_dim_key: str | None = None
    mlp_key: str | None = None
    mlp_ratio: bool = False
    heads: Part | None = None
    mlp: Part | None = None
    widths: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # template -> axes that follow the width
    head_dims: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    derived: bool = False  # the library derives head_dim from width // heads
    depth_trouble: str = ""
    heads_trouble: str = ""
    mlp_trouble: str = ""


@dataclass(frozen=True)
class Finding:
    """A family as found on a small model with the user's flags."""

    model_type: str
    cls: str
    stages: tuple[Stage, ...]
    trouble: str = ""  # why nothing can be done at all
    attempt: int = 0
    parameters: int = 0
    seconds: float = 0.0
    depths: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
