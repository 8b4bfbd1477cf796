"""Bounds on the work of a calibrated cut, and the cost of its parts. Bounds are counted in forward passes of the source
over the fit and guard samples; costs in block-tokens: one token through one block, times three where gradients are
computed.

A part that would exceed a bound is skipped before it starts: sets of layers, ways of healing, steps of the local fit.
One set is always refitted on all data, since there is no result without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leansurgeon.surgery.candidates import Candidate, course, divides_heads, last_made, stages_of
from leansurgeon.surgery.planning import Plan

CHOICE, ALL = 3.0, 10.0  # passes allowed for choice and closed-form refit, and for everything with the local fit
LEAST = 16_384  # tokens; smaller data sets get the bounds of this many
TRIAL = {"fit": 8_192, "guard": 2_048}  # tokens on which sets of layers compete
SMALLER = (0.5, 0.25)  # shares of the trial data to fall back to when all sets on all of it would exceed the bound


@dataclass(frozen=True)
class Effort:
    """How a cut heals (whether it refits at all, pre-norm or not, attentions per layer), and the number of tokens, as
    blocks count them, in the fit samples, the guard samples and the guard's first batch.
    """

    fit: float
    guard: float
    first: float
    heals: bool = True
    pre_norm: bool = True
    attentions: int = 1


def cost(plan: Plan, way: Candidate, effort: Effort, share: float = 1.0) -> float:
    """Return the block-tokens of one candidate, without the teacher's own. Behind the last layer that it changes, only
    a `share` of the guard samples continues.

    How far a projection reaches (or which norm closes the block) is found on one batch; the sums take all.
    """
    fit, guard, looks = effort.fit, effort.guard, 2 * effort.first
    refit = looks * (1 if effort.pre_norm else 2) + fit + 2 * guard
    layers = course(way.kept, plan)
    last = last_made(layers, later=way.later)
    total, begun, gone = 0.0, False, False
    for j, new in enumerate(layers):
        begun, gone = begun or new.changed, gone or new.cut
        refits = effort.heals and (new.cut or (effort.pre_norm and (new.near or (gone and way.later))))
        goes_on = fit if j < last else 0.0
        if begun and not (new.changed or refits):
            total += goes_on + (guard if j < last else share * guard)
        elif begun:
            projections = 1 + effort.attentions if way.attention and new.changed else 1
            total += goes_on + (projections * refit if refits else guard)
            (before, after), trim = stages_of(plan, new.kept), looks + fit + guard
            heads = fit if divides_heads(plan, new.kept) else trim if after.heads < before.heads else 0.0
            total += heads + (trim if after.mlp_dim < before.mlp_dim else 0.0)
    return total


def fitting(costs: Sequence[float], room: float) -> list[int]:
    """Which pieces are begun, in their order: the first in any case, others as far as there is room for all of them.

    >>> fitting([3, 4, 9, 1], 8.5)
    [0, 1, 3]
    """
    begun, spent = [], 0.0
    for i, each in enumerate(costs):
        if not i or spent + each <= room:
            begun, spent = [*begun, i], spent + each
    return begun
