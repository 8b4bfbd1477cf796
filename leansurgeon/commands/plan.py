"""Plan: what a shape costs before and after, before anything is written."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from leansurgeon.commands.command import Answer, Command
from leansurgeon.commands.options import ModelRequest
from leansurgeon.errors import short
from leansurgeon.progress import Say
from leansurgeon.request import Access, Opt, ShapeRequest, SourceName

if TYPE_CHECKING:
    from leansurgeon.surgery.costs import Cost, Costs

DEFAULT_BATCH = 32
TRAINING = {"batch", "tokens", "precision", "attention", "optimizer", "checkpointing", "world_size"}


class PlanRequest(ShapeRequest, ModelRequest, Access):
    """A model, the wanted shape, and how it would be trained; None is the default."""

    source: SourceName
    memory: Annotated[bool, Opt("Predict peak training memory; --batch to --gpu imply it.", "Shape")] = False
    batch: Annotated[int | None, Field(ge=1), Opt(f"Micro batch of one GPU. Default: {DEFAULT_BATCH}.")] = None
    tokens: Annotated[
        int | None, Field(ge=1), Opt("Tokens of a text sample. Default: what the model takes, at most 1024.")
    ] = None
    precision: Annotated[
        Literal["bf16", "fp16", "fp32"] | None, Opt("bf16 (default), fp16 or fp32; weights are fp32.", cli=str)
    ] = None
    attention: Annotated[
        Literal["sdpa", "eager"] | None, Opt("sdpa (default): fused. eager: score matrices in memory.", cli=str)
    ] = None
    optimizer: Annotated[
        Literal["adamw", "adamw-foreach", "adam", "sgd"] | None,
        Opt("adamw (default, fused), adamw-foreach, adam or sgd.", cli=str),
    ] = None
    checkpointing: Annotated[bool, Opt("Recompute activations in the backward pass.")] = False
    world_size: Annotated[int | None, Field(ge=1), Opt("GPUs of a DDP training.")] = None
    gpu: Annotated[
        str | None, Opt("a100-40, a100-80, h100, h200 or a6000: does it fit, and how much?", complete="gpus")
    ] = None


@dataclass(frozen=True)
class Plan(Answer):
    """Parameters, operations and, if requested, memory of a model before and after a cut."""

    costs: Costs = field(repr=False, kw_only=True)

    @property
    def before(self) -> Cost:
        """The source: `shape`, `parameters`, `operations`, `memory`."""
        return self.costs.before

    @property
    def after(self) -> Cost:
        """The same of the result."""
        return self.costs.after


def plan(request: PlanRequest, say: Say) -> Plan:
    """Count parameters, operations and peak training memory of SOURCE before and after a cut; writes nothing.

    Counts take no time; memory takes a few seconds, for a training step that is simulated on tensors without memory.

    >>> import leansurgeon
    >>> found = leansurgeon.plan("vit-b", heads=16, layers=7)
    >>> found.before.parameters.total, found.after.parameters.total
    (86567656, 56638696)

    Raises `UsageError` for a shape that cannot be, `UnsupportedModel` for a source that cannot be read.
    """
    from leansurgeon.checkpoints.source import ask_tower, open_source
    from leansurgeon.measure.costs import gpus
    from leansurgeon.measure.costs.memory import Setting
    from leansurgeon.report.tables.cut import costs_table
    from leansurgeon.surgery.costs import costs
    from leansurgeon.surgery.requested_shape import RequestedShape

    wanted = RequestedShape(**request.model_dump(include=set(ShapeRequest.model_fields)))
    wanted.check()
    card = gpus.find(request.gpu) if request.gpu else None
    said = request.model_dump(include=TRAINING, exclude_defaults=True)
    setting = None
    if said or request.memory or request.gpu:
        setting = Setting(**{"batch": DEFAULT_BATCH} | said)
    with ExitStack() as keep:
        access = {"allow_pickle": request.allow_pickle, "tower": request.tower}
        opened = open_source(request.source, weights=False, keep=keep, **access)
        ask_tower(opened, request.tower)
        found = costs(opened, wanted, setting, card, cross_check=setting is not None)
        text = costs_table(replace(found, source=short(found.source, 32)))
        return Plan({"schema_version": 1, **found.as_dict()}, text, costs=found)


COMMAND = Command(
    "plan", PlanRequest, plan, ("leansurgeon plan vit-b --heads 16 --layers 7 --gpu a100-40",), shows=True
)
