"""Candidates that calibrated surgery compares: sets of layers, and ways of healing.

First the sets of layers compete, each with a refit of the MLP's output at its cuts, where it matters most. Then ways of
healing compete for the best set, since each helps some models and hurts others: the attention's output projection
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

LONGEST = 2 * len(PHASES)  # maximum blocks in a span around a cut
TOGETHER = (PHASES[1],)  # one more round for a span around several cuts, or over a whole stage


@dataclass(frozen=True)
class Candidate(Recorded):
    """Layers to keep, the criterion that chose them, and what is refitted besides the MLP's output at the cuts."""

    kept: tuple[int, ...]
    criterion: str
    attention: bool = False  # also refit the attention's output at the cuts
    later: bool = False  # also refit the MLP's output in every layer behind the first cut

    def as_tried(self, score: GuardScore, data: str, *, left_out: bool = False) -> Tried:
        """Return the candidate as an entry of the record, with its score on `data`."""
        return Tried(self.kept, self.criterion, self.attention, self.later, score, left_out=left_out, data=data)


# -- what a plan changes in a layer ----------------------------------------------------------------


def stages_of(plan: Plan, layer: int) -> tuple[Stage, Stage]:
    """Return the stage of a source layer, before and after."""
    number = plan.before.stage_of(layer)
    return plan.before.stages[number], plan.after.stages[number]


def is_near(plan: Plan, layer: int) -> bool:
    """Return whether the plan itself changes what a kept source layer computes (independent of its input)."""
    before, after = stages_of(plan, layer)
    return after.heads < before.heads or after.mlp_dim < before.mlp_dim or after.head_dim < before.head_dim


def divides_heads(plan: Plan, layer: int) -> bool:
    """Return whether heads of a kept source layer are split into smaller ones that are fitted to it."""
    before, after = stages_of(plan, layer)
    return after.head_dim < before.head_dim and plan.init == "transfer"


class NewLayer(NamedTuple):
    """A layer of a result, made from source layer `kept`; it stands for all source layers up to `until`. `gap`: it is
    the first of its stage and the source's first is dropped, so it must also replace what came before. `near`: the plan
    changes what it computes.
    """

    kept: int
    until: int
    gap: bool
    near: bool

    @property
    def cut(self) -> bool:
        """Whether it also stands for other source layers."""
        return self.gap or self.until > self.kept

    @property
    def changed(self) -> bool:
        """Whether it must compute something else than its source layer."""
        return self.cut or self.near


def course(kept: Sequence[int], plan: Plan) -> list[NewLayer]:
    """Return the layers of a result in order."""
    layers = []
    for stage in plan.before.spans:
        here = [i for i in kept if i in stage]
        for layer, following in pairwise([*here, stage.stop]):
            gap = layer == here[0] > stage.start
            layers.append(NewLayer(layer, following - 1, gap, is_near(plan, layer)))
    return layers


def last_made(layers: Sequence[NewLayer], *, later: bool) -> int:
    """Return the last new layer that is changed or refitted (-1: none); with `later`, all behind a change are
    refitted.
    """
    last = max((j for j, new in enumerate(layers) if new.changed), default=-1)
    return len(layers) - 1 if later and last >= 0 else last


# -- where a local fit may help ----------------------------------------------------------------------


@dataclass
class CutMark:
    """One cut of a candidate: the new layer before it (`first`), the new layers at which a span may end (`ends`), the
    student's streams before the first, and the source's output behind each of the others (known once all layers are
    made).
    """

    first: int
    ends: tuple[int, ...]
    phases: tuple[Phase, ...]
    streams: dict[str, Stream] = field(default_factory=dict)
    goals: dict[int, Mapping[str, list[Tensor]]] = field(default_factory=dict)


def marks(kept: tuple[int, ...], plan: Plan) -> list[CutMark]:
    """Return the cuts of a candidate. A span never reaches another cut or another stage. If a short stage has several
    cuts, everything behind the first forms one more span; if all its heads were split, the whole stage does.
    """
    cuts = [j for j, new in enumerate(course(kept, plan)) if new.cut]
    all_marks = []
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
    """Return a cut whose span grows from `first` to at most `limit`. If that leaves fewer phases, the last one also
    takes the steps of the missing ones.
    """
    ends = growing_ends(first, limit)
    *early, last = PHASES[: len(ends)]
    rest = sum(phase.steps for phase in PHASES[len(ends) :])
    return CutMark(first, ends, (*early, Phase(last.steps + rest, last.rate)))


def growing_ends(first: int, limit: int) -> tuple[int, ...]:
    """Return the layers at which spans from `first` end, in steps of two, then `limit` itself if a phase is left."""
    if limit <= first:
        return (first,)
    ends = tuple(range(first + 1, limit + 1, 2))[: len(PHASES)]
    return ends if ends[-1] == limit or len(ends) == len(PHASES) else (*ends, limit)
