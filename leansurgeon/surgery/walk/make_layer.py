"""Make a new layer whose shape differs from its source's in a way that is not exact: heads or MLP units trimmed by what
they do on the student's own activations, heads split into heads of another size. Imports torch.

The source's block is filled in the teacher's skeleton and run on the *student's* hidden states, so the choice knows
what earlier layers have become. Trimmed projections make up for what goes (`trim_units`).
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from leansurgeon.shape import Shape, Stage
from leansurgeon.surgery.layer import trim_units
from leansurgeon.surgery.plan.planning import Plan, target_specs
from leansurgeon.surgery.refit import block, heal, heal_block
from leansurgeon.surgery.refit.heal_block import Samples, Site
from leansurgeon.surgery.walk.choose_layers import ranges

if TYPE_CHECKING:
    from leansurgeon.surgery.walk.student import Student

RIDGES = (1e-3, 1e-2, 0.1, 1.0)
RIDGE = 0.1  # of the refit of W_o behind split heads
REFINE = 60  # steps on the score forms of split heads, where fitting is asked for


def stages_of(plan: Plan, layer: int) -> tuple[Stage, Stage]:
    """The stage of a source layer, before and after."""
    number = next(s for s, stage in enumerate(ranges(plan.before)) if layer in stage)
    return plan.before.stages[number], plan.after.stages[number]


def is_near(plan: Plan, layer: int) -> bool:
    """Whether the plan changes what a kept source layer computes, whatever stands before it."""
    before, after = stages_of(plan, layer)
    return after.heads < before.heads or after.mlp_dim < before.mlp_dim or after.head_dim < before.head_dim


def divides_heads(plan: Plan, layer: int) -> bool:
    """Whether heads of a kept source layer become smaller ones that are fitted to what they do."""
    before, after = stages_of(plan, layer)
    return after.head_dim < before.head_dim and plan.init == "transfer"


def make(student: Student, site: Site, kept: int) -> dict[str, Any]:
    """Fill the student's block at `site` with what becomes of source layer `kept`. Returns what was decided."""
    bench = student.bench
    before, after = stages_of(bench.plan, kept)
    record: dict[str, Any] = {}
    bench.fill(kept)
    work = on_source(bench, site, kept)
    given: dict[str, np.ndarray] = {}
    solved: list[tuple[nn.Module, list[int], int]] = []  # projections of the source's block that were re-solved
    o, down = bench.teacher.projections(kept)[0], bench.teacher.mlp_down(kept)
    if divides_heads(bench.plan, kept):
        given, record["split"] = split(student, work, kept, site.layer)
    elif after.heads < before.heads and after.head_dim == before.head_dim:
        shared = 1 if before.kv_heads == before.heads else before.kv_heads
        fixed = student.measured_heads(kept)
        shared = shared if fixed is None else 1
        found, note = trim(work, o, before.head_dim, after.heads, shared, freeze=down, fixed=fixed)
        block.add_to(o, *halves(found.change, o))
        record["heads"] = note | {"kept": found.kept}
        solved.append((o, found.kept, before.head_dim))
        student.choose_heads(kept, np.array(found.kept), before)
    if after.mlp_dim < before.mlp_dim:
        found, note = trim(work, down, 1, after.mlp_dim, 1)
        block.add_to(down, *halves(found.change, down))
        record["mlp"] = note
        solved.append((down, found.kept, 1))
        student.choose_units(kept, np.array(found.kept))
    student.skeleton.fill(site.layer, student.tensors(site.layer) | given)
    for module, groups, size in solved:
        here = student.skeleton
        target = here.projections(site.layer)[0] if module is o else here.mlp_down(site.layer)
        block.weight_of(target).copy_(new_weight(module, groups, size))
        if target.bias is not None:
            target.bias.data.copy_(module.bias.data)
    if bench.current == kept:
        bench.fill(kept)  # the teacher needs it as it was
    else:
        bench.teacher.empty(kept)
    return record


def on_source(bench: Any, site: Site, kept: int) -> Site:
    """The same samples, run through the source's block `kept`."""

    def part(name: str, samples: Samples) -> Samples:
        return replace(samples, stream=bench.streams[name])

    return replace(site, layer=kept, fit=part("fit", site.fit), guard=part("guard", site.guard))


def new_weight(module: nn.Module, kept: list[int], group: int) -> Tensor:
    at = (torch.tensor(kept)[:, None] * group + torch.arange(group)).reshape(-1)
    return block.weight_of(module)[:, at].clone()


def halves(change: Tensor, module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """A change (I [+ 1], O) as that of the weight (O, I) and of the bias."""
    inputs = block.weight_of(module).shape[1]
    return change[:inputs].T.float(), change[inputs].float() if module.bias is not None else None


def trim(
    work: Site,
    module: nn.Module,
    group: int,
    keep: int,
    shared: int,
    freeze: nn.Module | None = None,
    fixed: list[int] | None = None,
) -> tuple[trim_units.Trimmed, dict[str, Any]]:
    """The best of several ridges by the guard, with the remaining columns re-solved or left as they are. `fixed` are
    the groups that stay, where they are chosen already.
    """
    scale = block.reach(module, work.first, freeze=freeze)
    sums = [moments(work, part, module, scale) for part in (work.fit, work.guard)]
    old = block.weight_of(module).double()
    error, best = inf, None
    for ridge in RIDGES:
        found = trim_units.trim(
            sums[0].gram, sums[0].solve(ridge), old, group, keep, ridge, shared, worth=sums[0].worth, fixed=fixed
        )
        plain = torch.zeros_like(found.change)
        gone = [g for g in range(old.shape[1] // group) if g not in set(found.kept)]
        at = (torch.tensor(gone)[:, None] * group + torch.arange(group)).reshape(-1)
        plain[at] = -old.T[at]
        for solved, way in ((True, found), (False, replace(found, change=plain))):
            if (now := sums[1].error(way.change)) < error or best is None:
                error, best, chosen = now, way, {"ridge": ridge, "re_solved": solved}
    tokens = max(1.0, sums[1].tokens)
    note = chosen | {
        "guard_without_trim": round((sums[1].error() / tokens) ** 0.5, 6),
        "guard_after": round((error / tokens) ** 0.5, 6),
    }
    return best, note


def moments(work: Site, samples: Samples, module: nn.Module, scale: Tensor | None) -> heal.NormalEquations:
    """As for a refit; where the way to the block's output is no sum (post-norm), the target is what the projection
    itself gave.
    """
    if scale is not None:
        return heal_block.moments(work, samples, module, scale)
    sums = heal_block.equations(module, samples.hidden[0].device)
    for b in range(len(samples)):
        with block.inputs_of(module) as seen:
            out = work.run(samples, b)
        mask = samples.masks[b]
        a = block.flat(seen[0].reshape(*out.shape[:-1], -1), mask)
        sums.add(a, torch.zeros(len(a), sums.cross.shape[1]))
    return sums


def split(student: Student, work: Site, kept: int, new: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Heads of another size by `split_heads`: the attention's tensors of new layer `new`, and the numbers.

    Where the layer behind is not cut, W_o is refitted towards the teacher's own state behind the attention, so it also
    makes up for what earlier layers have lost; else towards what the parent gives for the same inputs.
    """
    from leansurgeon.surgery.layer import canonical, split_heads

    bench = student.bench
    source, plan = bench.source, bench.plan
    number = next(s for s, stage in enumerate(ranges(plan.before)) if kept in stage)
    after, attention = plan.after.stages[number], canonical.unpack(source, kept).attention
    gain = None if canonical.scale_is_derived(source) else 1.0
    made, note = split_heads.activation_aware(
        attention,
        attention_inputs(work),
        work.fit.masks,
        after,
        causal=bench.causal,
        targets_BTW=attention_goals(bench, work) if bench.current == kept else None,
        score_scale=canonical.score_scale(source, number),
        score_gain=gain,
        ridge=RIDGE if bench.options.heal else None,
        refine=REFINE if bench.options.fit else 0,
    )
    stages = [replace(a, mlp_dim=b.mlp_dim) for a, b in zip(plan.after.stages, plan.before.stages, strict=True)]
    layer = replace(canonical.unpack(source, kept), attention=made)
    tensors = canonical.pack(layer, source, plan.architecture, Shape(tuple(stages)), new)
    roles = ("q", "k", "v", "qk", "qkv", "o")
    chosen = {s.name for s in target_specs(source, plan.architecture, plan.after) if s.layer == new and s.role in roles}
    return {name: values for name, values in tensors.items() if name in chosen}, note


def attention_inputs(work: Site) -> list[Tensor]:
    """What the attention of the source's block reads, on the student's hidden states."""
    skeleton = work.fit.stream.skeleton
    module = next(m[0] for role in ("q", "qkv", "qk") if (m := skeleton.of_role(work.layer, role)))
    return [block.seen_at(module, lambda b=b: work.run(work.fit, b)) for b in range(len(work.fit))]


def attention_goals(bench: Any, work: Site) -> list[Tensor]:
    """What the attention would have to give so that the student stands behind it where the teacher stands."""
    states = zip(bench.attention_gave, bench.streams["fit"].hidden, work.fit.hidden, strict=True)
    return [gave + teacher - student for gave, teacher, student in states]
