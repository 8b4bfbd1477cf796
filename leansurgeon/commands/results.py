"""What the functions of the surface give back. Printed, a result is what the command prints; `as_dict()` is the
document of its --json.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from leansurgeon.commands.surface import public
from leansurgeon.reading.jsonfile import JsonObject

RESULT = "leansurgeon"  # the attribute of a model in memory that has its `Cut` or `Trained`

if TYPE_CHECKING:
    import torch

    from leansurgeon.checkpoints.record import Proof, SurgeryRecord
    from leansurgeon.checkpoints.recorded.planned import Planned
    from leansurgeon.shape import Shape
    from leansurgeon.training.runs.summary import Summary


class Folder:
    """A folder that `load` and plain transformers or timm load."""

    folder: Path

    @cached_property
    @public
    def model(self) -> torch.nn.Module:
        """The model, loaded once; `model.leansurgeon` is this result."""
        from leansurgeon.checkpoints.loading import load

        made = load(str(self.folder))
        setattr(made, RESULT, self)
        return made

    @public
    def push_to_hub(self, repo: str, *, private: bool = True, force: bool = False, token: str | None = None) -> str:
        """Put the folder into the repository `org/name` of the hub, made private if it is new; returns its address.
        `force` replaces the model that somebody else has there; text and metadata of its card stay all the same.

        Raises `UsageError` without a token or for a repository of another model, and `errors.NotPushed` where the hub
        refuses: the folder stays.
        """
        from leansurgeon.commands.push import push

        return push(self.folder, repo, private=private, force=force, token=token)


@dataclass(frozen=True)
class Cut(Folder):
    """A model that was cut: its `folder`, and the `record` that stands in its surgery.json."""

    folder: Path
    record: SurgeryRecord = field(repr=False)
    document: JsonObject = field(repr=False)
    text: str = field(default="", repr=False)
    held: tuple[object, ...] = field(default=(), repr=False, compare=False)  # folders of models in memory

    @property
    def proof(self) -> Proof | None:
        """What the fresh process found that loaded the result; None where none was asked for."""
        return self.record.proof

    @property
    def plan(self) -> Planned:
        """The plan as it was carried out: operators, shapes, parameters."""
        return self.record.plan

    @property
    def before(self) -> Shape | None:
        """Layers, heads, head_dim and MLP of the source."""
        return self.record.plan.before

    @property
    def after(self) -> Shape | None:
        """The same of the result."""
        return self.record.plan.after

    @property
    def parameters(self) -> int | None:
        """Parameters of the result; None where its record does not say."""
        return self.record.plan.parameters_after.get("total")

    def as_dict(self) -> JsonObject:
        """What --json prints."""
        return self.document

    def __str__(self) -> str:
        if self.text:
            return self.text
        before, after = self.record.plan.parameters_before.get("total"), self.parameters
        known = f" with {after:,} of {before:,} parameters" if before is not None and after is not None else ""
        return f"{self.folder}: {self.record.source.name}{known}"


@dataclass(frozen=True)
class Trained(Folder):
    """A training: `run` is its folder, `folder` the best model in it, `summary` what it came to."""

    run: Path
    folder: Path
    summary: Summary = field(repr=False)
    held: tuple[object, ...] = field(default=(), repr=False, compare=False)

    @property
    def record(self) -> SurgeryRecord | None:
        """The surgery before the training; None where there was none."""
        from leansurgeon.checkpoints import record

        return record.read_if_whole(self.folder)

    @property
    def before(self) -> float | None:
        """The task's metric before the training."""
        return self.summary.before and self.summary.before.metric

    @property
    def after(self) -> float | None:
        """The task's metric of the best model."""
        best = self.summary.best or self.summary.final
        return best and best.metric

    def as_dict(self) -> JsonObject:
        """What --json prints."""
        return self.summary.as_dict()

    def __str__(self) -> str:
        return str(self.run)
