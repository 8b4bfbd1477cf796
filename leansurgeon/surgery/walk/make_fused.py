"""Make a new layer out of two neighbouring ones of the source (`--method fuse`). Imports torch.

The fused layer (`fuse_layers`) stands in a skeleton of its own with twice the heads and units, runs there on the
*student's* hidden states, and is trimmed to the wanted shape by what the rest can make up for (`trim_units`): whole
key/value heads with their queries, then MLP units. What the result wants beyond that is padded with silent ones.
"""

from __future__ import annotations

from dataclasses import replace

from leansurgeon.checkpoints.blockwise.stream import Stream
from leansurgeon.errors import UsageError
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.shape import Stage
from leansurgeon.surgery.layer import canonical, fuse_layers
from leansurgeon.surgery.refit import block
from leansurgeon.surgery.refit.heal_block import BlockFit
from leansurgeon.surgery.walk import choose_layers
from leansurgeon.surgery.walk.candidates import Candidate
from leansurgeon.surgery.walk.changes import stages_of
from leansurgeon.surgery.walk.ground import Ground, View
from leansurgeon.surgery.walk.make_layer import Made, trim


def check(before: Stage, after: Stage) -> None:
    """Raises `UsageError` where fused layers cannot be brought to the wanted shape."""
    if after.head_dim != before.head_dim:
        raise UsageError(
            f"--method fuse keeps heads of {before.head_dim}, and {after.head_dim} was asked for.",
            "Fuse first, then split the heads of the result.",
        )
    if after.heads // after.kv_heads < before.heads // before.kv_heads:
        raise UsageError(
            f"--method fuse keeps key/value heads with all of their {before.heads // before.kv_heads} query heads, and "
            f"{after.heads} heads on {after.kv_heads} are fewer.",
            "Fuse first, then take heads from the result.",
        )


def make_fused(ground: Ground, view: View, site: BlockFit, kept: int) -> Made:
    """Source layers `kept` and `kept` + 1 in one, for the block at `site`: all tensors of that block."""
    source, plan, skeleton = ground.source, ground.plan, ground.wide
    before, after = stages_of(plan, kept)
    norms = fuse_layers.norms_of(source, plan.before.stage_of(kept))
    fused = fuse_layers.fuse(canonical.unpack(source, kept), canonical.unpack(source, kept + 1), norms)
    skeleton.fill(kept, canonical.pack(fused, ground.wide_model, kept))
    work = site.on(view.standing(skeleton), kept)
    made = Made(fused=(kept, kept + 1))
    groups, units = list(range(2 * before.kv_heads)), list(range(2 * before.mlp_dim))
    o, down = skeleton.projections(kept)[0], skeleton.mlp_down(kept)
    if after.kv_heads < len(groups):
        size = before.heads // before.kv_heads * before.head_dim
        groups, note = trim(work, o, size, after.kv_heads, 1, freeze=down)
        made = replace(made, heads_trimmed=replace(note, kept=tuple(groups)))
    if after.mlp_dim < len(units):
        units, note = trim(work, down, 1, after.mlp_dim, 1)
        made = replace(made, units_trimmed=note)
    wide = ground.wide_source
    layer = canonical.unpack_arrays(skeleton.read(kept), wide, [s for s in wide.specs if s.layer == kept])
    skeleton.empty(kept)
    layer = fuse_layers.pad(fuse_layers.take(layer, groups, units), after, seed=plan.seed + site.layer)
    return replace(made, tensors=canonical.pack(layer, plan.target, site.layer))


# -- which pairs -----------------------------------------------------------------------------------


def pair_errors(ground: Ground, view: View) -> list[float]:
    """For every layer but the last: how far it and the next, given the same input, are from one after the other, as
    relative error per token on the guard samples. One pass, one block in memory.
    """
    teacher, masks = ground.teacher, view.masks["guard"]
    stream = Stream(teacher, view.batches["guard"])
    before, errors = stream.hidden, []
    for layer in range(teacher.depth):
        ground.fill(layer)
        now, outputs = stream.hidden, stream.run()
        if layer and layer not in stream.crossings:
            aside = stream.run(layer, before)
            sums = [b + c - a for a, b, c in zip(before, now, aside, strict=True)]
            errors.append(choose_layers.mean_of(block.relative_error, outputs, sums, masks))
        elif layer:
            errors.append(float("inf"))
        teacher.empty(layer)
        before = now
        stream.advance(outputs)
    return [*errors, float("inf")]


def candidates(ground: Ground, view: View) -> tuple[list[Candidate], JsonObject]:
    """Layers to fuse, and the numbers behind them."""
    plan = ground.plan
    for a, b in zip(plan.before.stages, plan.after.stages, strict=True):
        check(a, b)
    fuse_layers.norms_of(ground.source)  # a reason against it is said before long work
    errors = pair_errors(ground, view)
    fused: list[int] = []
    for stage, after in zip(plan.before.spans, plan.after.stages, strict=True):
        fused += fuse_layers.choose_pairs(errors, stage, len(stage) - after.depth)
    kept = tuple(i for i in range(plan.before.depth) if i - 1 not in fused)
    evidence = {"pair_errors": [None if e == float("inf") else round(e, 6) for e in errors]}
    return [Candidate(kept, "fuse", fused=tuple(fused))], evidence
