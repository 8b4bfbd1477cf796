"""Which sets of layers, healed in which way, calibrated surgery tries against each other.

First the sets of layers compete, each with the refit of the MLP's output at its cuts: there it matters most. Then ways
of healing compete for the best set, since each helps some models and hurts others: the attention's output projection
refitted before the MLP's at the cuts, and the MLP's output refitted in all layers behind the first cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from leansurgeon.checkpoints.blockwise.stream import Stream
from leansurgeon.checkpoints.recorded.decided import GuardScore, Tried
from leansurgeon.checkpoints.recorded.part import Recorded
from leansurgeon.shape import Stage
from leansurgeon.surgery.local_fit import PHASES, Phase
from leansurgeon.surgery.operators import SHORT
from leansurgeon.surgery.planning import Plan

LONGEST = 2 * len(PHASES)  # blocks that a span around a cut grows to at most
TOGETHER = (PHASES[1],)  # spans around several cuts, or all of a stage, once more as one


@dataclass(frozen=True)
class Candidate(Recorded):
    """Layers to keep, what chose them, and what is refitted beside the MLP's output at cuts."""

    kept: tuple[int, ...]
    criterion: str
    attention: bool = False  # the attention's output at cuts, too
    later: bool = False  # the MLP's output in every layer behind the first cut, too

    def as_tried(self, score: GuardScore, data: str, *, left_out: bool = False) -> Tried:
        """The candidate as the record has it, with its score on `data`."""
        return Tried(self.kept, self.criterion, self.attention, self.later, score, left_out=left_out, data=data)


# -- what a plan changes at which layer -------------------------------------------------------------


def stages_of(plan: Plan, layer: int) -> tuple[Stage, Stage]:
    """The stage of a source layer, before and after."""
    number = plan.before.stage_of(layer)
    return plan.before.stages[number], plan.after.stages[number]


def is_near(plan: Plan, layer: int) -> bool:
    """Whether the plan changes what a kept source layer computes, whatever stands before it."""
    before, after = stages_of(plan, layer)
    return after.heads < before.heads or after.mlp_dim < before.mlp_dim or after.head_dim < before.head_dim


def divides_heads(plan: Plan, layer: int) -> bool:
    """Whether heads of a kept source layer become smaller ones that are fitted to what they do."""
    before, after = stages_of(plan, layer)
    return after.head_dim < before.head_dim and plan.init == "transfer"


class NewLayer(NamedTuple):
    """A layer of a result, made of source layer `kept`; it stands for all up to `until`. `gap`: it is the first of its
    stage and the source's first is gone, so it has to take over what went before it. `near`: the plan changes what it
    computes.
    """

    kept: int
    until: int
    gap: bool
    near: bool

    @property
    def cut(self) -> bool:
        """Whether it stands for other source layers, too."""
        return self.gap or self.until > self.kept

    @property
    def changed(self) -> bool:
        """Whether it has to do something else than its source layer."""
        return self.cut or self.near


def course(kept: Sequence[int], plan: Plan) -> list[NewLayer]:
    """The layers of a result in order."""
    layers: list[NewLayer] = []
    for stage in plan.before.spans:
        here = [i for i in kept if i in stage]
        for layer, following in pairwise([*here, stage.stop]):
            gap = layer == here[0] > stage.start
            layers.append(NewLayer(layer, following - 1, gap, is_near(plan, layer)))
    return layers


def last_made(layers: Sequence[NewLayer], *, later: bool) -> int:
    """The last new layer that is made or refitted (-1: none), where `later` ones are, too."""
    last = max((j for j, new in enumerate(layers) if new.changed), default=-1)
    return len(layers) - 1 if later and last >= 0 else last


# -- where a local fit may help ----------------------------------------------------------------------


@dataclass
class CutMark:
    """One cut of a candidate: the new layer before it, the new layers that may end a span, the student's streams
    before the first, and what the source gives behind each of the others (known when all layers are made).
    """

    first: int
    ends: tuple[int, ...]
    phases: tuple[Phase, ...]
    streams: dict[str, Stream] = field(default_factory=dict)
    goals: dict[int, Mapping[str, list[Tensor]]] = field(default_factory=dict)


def marks(kept: tuple[int, ...], plan: Plan) -> list[CutMark]:
    """The cuts of a candidate. A span reaches no other cut and no other stage. Where a short stage has several cuts,
    what is behind the first is one more span; where its heads were divided, all of it.
    """
    cuts = [j for j, new in enumerate(course(kept, plan)) if new.cut]
    all_marks: list[CutMark] = []
    for stage in plan.after.spans:
        here = [j for j in cuts if j in stage]
        for first, following in pairwise([*here, stage.stop]):
            all_marks.append(growing(first, following - 1))
        if not here and len(stage) <= SHORT and all(divides_heads(plan, kept[j]) for j in stage):
            all_marks.append(growing(stage.start, stage.stop - 1))
        elif len(here) > 1 and stage.stop - here[0] <= LONGEST:
            all_marks.append(CutMark(here[0], (stage.stop - 1,), TOGETHER))
    return all_marks


def growing(first: int, limit: int) -> CutMark:
    """A cut whose span grows from `first` to `limit` at most. Where that is soon, its last phase takes the steps of
    those that are left.
    """
    ends = growing_ends(first, limit)
    *early, last = PHASES[: len(ends)]
    rest = sum(phase.steps for phase in PHASES[len(ends) :])
    return CutMark(first, ends, (*early, Phase(last.steps + rest, last.rate)))


def growing_ends(first: int, limit: int) -> tuple[int, ...]:
    """Where spans from `first` on end, two layers later each time; the last that may, if phases are left for it."""
    if limit <= first:
        return (first,)
    ends = tuple(range(first + 1, limit + 1, 2))[: len(PHASES)]
    return ends if ends[-1] == limit or len(ends) == len(PHASES) else (*ends, limit)
