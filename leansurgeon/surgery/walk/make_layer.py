"""Make a new layer whose shape differs from its source's in a way that is not exact: heads or MLP units trimmed by what
they do on the student's own activations, heads split into heads of another size. Imports torch.

The source's block is filled in a skeleton of its own (the workshop) and run on the *student's* hidden states, so the
choice knows what earlier layers have become. Trimmed projections make up for what goes (`trim_units`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
import torch
from torch import Tensor, nn

from leansurgeon.checkpoints.recorded.decided import Split, Trim
from leansurgeon.shape import Shape
from leansurgeon.surgery.layer import canonical, split_heads, trim_units
from leansurgeon.surgery.refit import block, heal, heal_block
from leansurgeon.surgery.refit.heal_block import BlockFit, Samples
from leansurgeon.surgery.walk.changes import divides_heads, stages_of
from leansurgeon.surgery.walk.ground import Ground, Lesson

RIDGES = (1e-3, 1e-2, 0.1, 1.0)
RIDGE = 0.1  # of the refit of W_o behind split heads


@dataclass(frozen=True)
class Solved:
    """A projection of the new layer that was solved for: its role, weight (O, I) and bias."""

    role: str
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Made:
    """What becomes of a source layer: the heads and units that stay (None: all, or as the weights say), projections
    that were solved for, tensors of the result by name, and what was decided: the heads that were divided, and how the
    output of heads and units made up for those that went.
    """

    heads: list[int] | None = None
    units: list[int] | None = None
    solved: tuple[Solved, ...] = ()
    tensors: Mapping[str, np.ndarray] = field(default_factory=dict)
    split: Split | None = None
    heads_trimmed: Trim | None = None
    units_trimmed: Trim | None = None


def make(ground: Ground, lesson: Lesson, site: BlockFit, kept: int, fixed: list[int] | None) -> Made:
    """What source layer `kept` becomes at `site`; `fixed` are the heads that stay, where they are chosen already."""
    before, after = stages_of(ground.plan, kept)
    made = Made()
    shop = ground.workshop
    ground.fill(kept, shop)
    work = site.on({part: stream.through(shop) for part, stream in lesson.streams.items()}, kept)
    o, down = shop.projections(kept)[0], shop.mlp_down(kept)
    if divides_heads(ground.plan, kept):
        tensors, note = split(ground, lesson, work, kept, site.layer)
        made = replace(made, tensors=tensors, split=note)
    elif after.heads < before.heads and after.head_dim == before.head_dim:
        shared = 1 if fixed is not None or before.kv_heads == before.heads else before.kv_heads
        heads, note = trim(work, o, before.head_dim, after.heads, shared, freeze=down, fixed=fixed)
        left = (solved("o", o, heads, before.head_dim),)
        made = replace(made, heads=heads, solved=left, heads_trimmed=replace(note, kept=tuple(heads)))
    if after.mlp_dim < before.mlp_dim and len(shop.of_role(kept, "down")) == 1:  # units of several go by weight
        units, note = trim(work, down, 1, after.mlp_dim, 1)
        left = (*made.solved, solved("down", down, units, 1))
        made = replace(made, units=units, solved=left, units_trimmed=note)
    shop.empty(kept)
    return made


def solved(role: str, module: nn.Module, kept: list[int], group: int) -> Solved:
    """A projection of the source's block without the inputs that go."""
    at = (torch.tensor(kept)[:, None] * group + torch.arange(group)).reshape(-1)
    bias = None if module.bias is None else module.bias.data.clone()
    return Solved(role, block.weight_of(module)[:, at].clone(), bias)


def trim(
    work: BlockFit,
    module: nn.Module,
    group: int,
    keep: int,
    shared: int,
    freeze: nn.Module | None = None,
    fixed: list[int] | None = None,
) -> tuple[list[int], Trim]:
    """Trim a projection in place, by the best of several ridges on the guard, the remaining columns re-solved or left
    as they are. `fixed` are the groups that stay, where they are chosen already. Returns those that stay, and the
    numbers.
    """
    scale = block.reach(module, work.first, freeze=freeze)
    sums = [trim_sums(work, part, module, scale) for part in (work.fit, work.guard)]
    old, gram, worth = block.weight_of(module).double().cpu(), sums[0].gram.cpu(), sums[0].worth.cpu()
    error, best = inf, None
    for ridge in RIDGES:
        solution = sums[0].solve(ridge).cpu()
        trimmed = trim_units.trim(gram, solution, old, group, keep, ridge, shared, worth=worth, fixed=fixed)
        plain = torch.zeros_like(trimmed.change)
        gone = sorted(set(range(old.shape[1] // group)) - set(trimmed.kept))
        at = (torch.tensor(gone)[:, None] * group + torch.arange(group)).reshape(-1)
        plain[at] = -old.T[at]
        for solved, way in ((True, trimmed), (False, replace(trimmed, change=plain))):
            if (now := sums[1].error(way.change)) < error or best is None:
                error, best, chosen = now, way, (ridge, solved)
    inputs = old.shape[1]
    block.add_to(module, best.change[:inputs].T.float(), None if module.bias is None else best.change[inputs].float())
    tokens = max(1.0, sums[1].tokens)
    errors = (round((each / tokens) ** 0.5, 6) for each in (sums[1].error(), error))
    return best.kept, Trim(*chosen, *errors)


def trim_sums(work: BlockFit, samples: Samples, module: nn.Module, scale: Tensor | None) -> heal.NormalEquations:
    """As for a refit; where the way to the block's output is no sum (post-norm), the target is what the projection
    itself gave.
    """
    if scale is not None:
        return heal_block.refit_sums(work, samples, module, scale)
    sums = heal_block.equations(module, block.weight_of(module).device)
    for b in range(len(samples)):
        with block.inputs_of(module) as seen:
            out = work.run(samples, b)
        a = block.entering(seen[0], out, samples.masks[b])
        sums.add(a, torch.zeros(len(a), sums.cross.shape[1], device=a.device))
    return sums


def split(ground: Ground, lesson: Lesson, work: BlockFit, kept: int, new: int) -> tuple[dict[str, np.ndarray], Split]:
    """Heads of another size by `split_heads`: the attention's tensors of new layer `new`, and the numbers.

    Where the layer behind is not cut, W_o is refitted towards the teacher's own state behind the attention, so it also
    makes up for what earlier layers have lost; else towards what the parent gives for the same inputs.
    """
    source, plan = ground.source, ground.plan
    number = plan.before.stage_of(kept)
    layer = canonical.unpack(source, kept)
    made, note = split_heads.activation_aware(
        layer.attention,
        attention_inputs(work),
        work.fit.masks,
        plan.after.stages[number],
        causal=ground.causal,
        targets_BTW=attention_goals(lesson, work) if lesson.layer == kept else None,
        score_scale=canonical.score_scale(source, number),
        score_gain=None if canonical.scale_is_derived(source) else 1.0,
        ridge=RIDGE if ground.options.refits else None,
    )
    stages = [replace(a, mlp_dim=b.mlp_dim) for a, b in zip(plan.after.stages, plan.before.stages, strict=True)]
    tensors = canonical.pack(replace(layer, attention=made), plan.target.at(Shape(tuple(stages))), new)
    roles = ("q", "k", "v", "qk", "qkv", "o")
    chosen = {s.name for s in plan.target.by_layer[new] if s.role in roles}
    return {name: values for name, values in tensors.items() if name in chosen}, Split(**note)


def attention_inputs(work: BlockFit) -> list[Tensor]:
    """What the attention of the source's block reads, on the student's hidden states."""
    skeleton = work.fit.stream.skeleton
    module = next(m[0] for role in ("q", "qkv", "qk") if (m := skeleton.of_role(work.layer, role)))
    return [block.seen_at(module, lambda b=b: work.run(work.fit, b)).cpu() for b in range(len(work.fit))]


def attention_goals(lesson: Lesson, work: BlockFit) -> list[Tensor]:
    """What the attention would have to give so that the student stands behind it where the teacher stands."""
    states = zip(lesson.attention, lesson.streams["fit"].hidden, work.fit.hidden, strict=True)
    return [gave.cpu() + teacher.cpu() - student.cpu() for gave, teacher, student in states]
