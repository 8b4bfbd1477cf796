"""What a plan changes at which layer: stages, cuts, and layers that compute something else."""

from __future__ import annotations

from leansurgeon.shape import Shape, Stage
from leansurgeon.surgery.plan.planning import Plan


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


def behind_gap(kept: tuple[int, ...], before: Shape) -> set[int]:
    """The kept layers that are the first of their stage in the result and not in the source: no kept layer stands
    before the gap that could take over what went, so these have to.
    """
    firsts = [(stage.start, next((i for i in kept if i in stage), stage.start)) for stage in before.spans]
    return {first for start, first in firsts if first > start}


def course(kept: tuple[int, ...], plan: Plan, *, later: bool) -> tuple[list[bool], list[bool], int]:
    """Of every new layer whether it stands for more than its own source layer, or behind a gap, and whether the plan
    changes what it computes; and the last that is made or refitted (-1: none), where `later` ones are, too.
    """
    gaps, near = behind_gap(kept, plan.before), [is_near(plan, layer) for layer in kept]
    cuts = [end != layer or layer in gaps for layer, end in zip(kept, ends(kept, plan.before), strict=True)]
    changed = [j for j in range(len(kept)) if cuts[j] or near[j]]
    return cuts, near, len(kept) - 1 if changed and later else max(changed, default=-1)


def ends(kept: tuple[int, ...], before: Shape) -> list[int]:
    """For every kept layer the last source layer that it stands for: the one before the next kept, or the end of its
    stage.
    """
    last = []
    for stage in before.spans:
        here = [i for i in kept if i in stage]
        last += [following - 1 for following in [*here[1:], stage.stop]] if here else []
    return last
