"""Plan: what a shape costs before and after, before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from leansurgeon.errors import UsageError

if TYPE_CHECKING:
    from leansurgeon.surgery.plan.costs import Costs
    from leansurgeon.surgery.plan.wanted import Wanted
    from leansurgeon.surgery.walk.projection import Projected

DEFAULT_BATCH = 32


@dataclass(frozen=True)
class Training:
    """How the model would be trained, for its memory; None is the usual. `memory` asks for it, and so does everything
    else here.
    """

    memory: bool = False
    batch: int | None = None
    tokens: int | None = None
    precision: str | None = None
    attention: str | None = None
    optimizer: str | None = None
    checkpointing: bool = False
    world_size: int | None = None
    gpu: str | None = None

    @property
    def asked(self) -> bool:
        """Whether memory is wanted."""
        others = (self.batch, self.tokens, self.precision, self.attention, self.optimizer, self.world_size, self.gpu)
        return self.memory or self.checkpointing or any(value is not None for value in others)


def plan(
    source: str,
    wanted: Wanted,
    training: Training,
    *,
    tower: str | None = None,
    allow_pickle: bool = False,
    cross_check: bool = False,
) -> Costs:
    """Parameters, operations and peak training memory before and after; with memory, `cross_check` lets torch count the
    operations, too.

    Raises `UsageError` for what cannot be; and what opening and predicting raise.
    """
    from leansurgeon.checkpoints.source import open_source
    from leansurgeon.measure.costs import gpus
    from leansurgeon.measure.costs.memory import Setting
    from leansurgeon.surgery.plan.costs import costs

    wanted.check()
    card = gpus.find(training.gpu) if training.gpu else None
    setting = None
    if training.asked:
        said = {key: value for key, value in asdict(training).items() if value is not None}
        setting = Setting(**{"batch": DEFAULT_BATCH} | {key: said[key] for key in said if key not in ("memory", "gpu")})
        setting.check()
    with ExitStack() as keep:
        opened = open_source(source, allow_pickle=allow_pickle, tower=tower, weights=False, keep=keep)
        return costs(opened, wanted, setting, card, cross_check=cross_check and setting is not None)


def calibrated(
    source: str, wanted: Wanted, *, tower: str | None = None, allow_pickle: bool = False
) -> Sequence[Projected]:
    """What a calibrated cut to the wanted layers would take on a GPU, for this model and for known sizes.

    Raises `UsageError` where no layer goes.
    """
    from leansurgeon.checkpoints.source import open_source
    from leansurgeon.surgery.plan.wanted import resolve
    from leansurgeon.surgery.walk.projection import projections

    with ExitStack() as keep:
        opened = open_source(source, allow_pickle=allow_pickle, tower=tower, weights=False, keep=keep)
        depth = resolve(opened, wanted).shape.depth
        if depth == opened.shape.depth:
            raise UsageError("--calibrate foretells a cut of layers, and all stay.", "Add --layers N.")
        return projections(opened, depth)
