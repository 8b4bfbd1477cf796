"""Plan: what a shape costs before and after, before anything is written."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from leansurgeon import progress
from leansurgeon.errors import short
from leansurgeon.reading.jsonfile import JsonObject

if TYPE_CHECKING:
    from leansurgeon.surgery.plan.costs import Cost, Costs
    from leansurgeon.surgery.plan.wanted import Wanted

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


@dataclass(frozen=True)
class Plan:
    """Parameters, operations and, where it was asked for, memory of a model before and after a cut."""

    costs: Costs = field(repr=False)

    @property
    def before(self) -> Cost:
        """The source: `shape`, `parameters`, `operations`, `memory`."""
        return self.costs.before

    @property
    def after(self) -> Cost:
        """The same of what the cut leads to."""
        return self.costs.after

    def as_dict(self) -> JsonObject:
        """What `plan --json` prints."""
        return {"schema_version": 1, **self.costs.as_dict()}

    def __str__(self) -> str:
        from leansurgeon.report.tables.costs import costs_table

        return costs_table(replace(self.costs, source=short(self.costs.source, 32)))


def plan(
    source: str,
    wanted: Wanted,
    training: Training,
    *,
    tower: str | None = None,
    allow_pickle: bool = False,
    cross_check: bool = False,
) -> Plan:
    """Parameters, operations and peak training memory before and after; with memory, `cross_check` lets torch count the
    operations, too. Raises `UsageError` for what cannot be, and what opening and predicting raise.
    """
    from leansurgeon.checkpoints.record import shown_if_newer
    from leansurgeon.checkpoints.source import ask_tower, open_source
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
        keep.enter_context(shown_if_newer(progress.say))
        opened = open_source(source, allow_pickle=allow_pickle, tower=tower, weights=False, keep=keep)
        ask_tower(opened, tower)
        return Plan(costs(opened, wanted, setting, card, cross_check=cross_check and setting is not None))
