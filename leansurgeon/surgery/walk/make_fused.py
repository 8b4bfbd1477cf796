"""Make a new layer out of two neighbouring ones of the source (`--method fuse`). Imports torch.

The fused layer (`fuse_layers`) stands in a skeleton of its own with twice the heads and units, runs there on the
*student's* hidden states, and is trimmed to the wanted shape by what the rest can make up for (`trim_units`): whole
key/value heads with their queries, then MLP units. What the result wants beyond that is padded with silent ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from leansurgeon import architectures
from leansurgeon.checkpoints.skeleton import Skeleton
from leansurgeon.checkpoints.source import Source
from leansurgeon.checkpoints.stream import Stream
from leansurgeon.errors import UnsupportedModel, UsageError
from leansurgeon.shape import Shape, Stage
from leansurgeon.surgery.layer import canonical, fuse_layers
from leansurgeon.surgery.plan.planning import as_family, target_specs
from leansurgeon.surgery.refit import block
from leansurgeon.surgery.refit.heal_block import Site
from leansurgeon.surgery.walk import choose_layers
from leansurgeon.surgery.walk.candidates import Candidate
from leansurgeon.surgery.walk.make_layer import halves, stages_of, trim

if TYPE_CHECKING:
    from leansurgeon.surgery.walk.student import Student


@dataclass(frozen=True)
class Wide:
    """The model with twice the heads, key/value heads and units in every layer, its blocks empty."""

    source: Source  # as a source of that shape, without its weights
    skeleton: Skeleton
    batches: dict[str, list]  # those of the streams
    streams: dict[str, Stream]


def wide(bench: Any) -> Wide:
    """The wide skeleton of a bench and its streams for the batches that are looked at now."""
    found: Wide | None = bench.wide
    if found is None or found.batches is not bench.batches:
        source, skeleton = (found.source, found.skeleton) if found else built(bench)
        streams = {part: Stream(skeleton, batches) for part, batches in bench.batches.items()}
        bench.wide = found = Wide(source, skeleton, bench.batches, streams)
    return found


def built(bench: Any) -> tuple[Source, Skeleton]:
    source: Source = bench.source
    shape = Shape(
        tuple(
            replace(s, heads=2 * s.heads, kv_heads=2 * s.kv_heads, mlp_dim=2 * s.mlp_dim) for s in source.shape.stages
        )
    )
    arch = source.architecture
    if not arch.holds(source.shape, shape):
        if arch.decoupled is None:
            raise UnsupportedModel(
                f"Layers cannot be fused: no {arch.name} can hold twice the heads of the same size.",
                "Use another --method.",
            )
        arch = architectures.decoupled(arch)
    config = arch.with_shape(as_family(source, arch), shape)
    skeleton = Skeleton(config, arch, bench.options.device)
    skeleton.share_outer(bench.teacher)
    specs = tuple(target_specs(source, arch, shape))
    return replace(source, config=config, architecture=arch, specs=specs), skeleton


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


def make_fused(student: Student, site: Site, kept: int) -> dict[str, Any]:
    """Fill the student's block at `site` with source layers `kept` and `kept` + 1 in one. Returns what was decided."""
    bench = student.bench
    source, plan = bench.source, bench.plan
    before, after = stages_of(plan, kept)
    number = next(s for s, stage in enumerate(choose_layers.ranges(plan.before)) if kept in stage)
    norms = fuse_layers.norms_of(source, number)
    fused = fuse_layers.fuse(canonical.unpack(source, kept), canonical.unpack(source, kept + 1), norms)
    here = wide(bench)
    shape = here.source.shape
    here.skeleton.fill(kept, canonical.pack(fused, source, here.source.architecture, shape, kept))
    parts = {name: replace(getattr(site, name), stream=here.streams[name]) for name in ("fit", "guard")}
    work = replace(site, layer=kept, **parts)
    record: dict[str, Any] = {"fused": [kept, kept + 1]}
    groups, units = list(range(2 * before.kv_heads)), list(range(2 * before.mlp_dim))
    o, down = here.skeleton.projections(kept)[0], here.skeleton.mlp_down(kept)
    if after.kv_heads < len(groups):
        size = before.heads // before.kv_heads * before.head_dim
        found, note = trim(work, o, size, after.kv_heads, 1, freeze=down)
        block.add_to(o, *halves(found.change, o))
        groups = found.kept
        record["heads"] = note | {"kept": groups}
    if after.mlp_dim < len(units):
        found, note = trim(work, down, 1, after.mlp_dim, 1)
        block.add_to(down, *halves(found.change, down))
        units = found.kept
        record["mlp"] = note
    specs = [s for s in here.source.specs if s.layer == kept]
    layer = canonical.unpack_arrays(here.skeleton.read(kept), here.source, specs)
    here.skeleton.empty(kept)
    layer = fuse_layers.pad(fuse_layers.take(layer, groups, units), after, seed=plan.seed + site.layer)
    student.skeleton.fill(site.layer, canonical.pack(layer, source, plan.architecture, plan.after, site.layer))
    return record


# -- which pairs -----------------------------------------------------------------------------------


def pair_errors(bench: Any) -> list[float]:
    """For every layer but the last: how far it and the next, given the same input, are from one after the other, as
    relative error per token on the guard samples. One pass, one block in memory.
    """
    stream = Stream(bench.teacher, bench.batches["guard"])
    before, errors = stream.hidden, []
    for layer in range(bench.teacher.depth):
        bench.fill(layer)
        now, outputs = stream.hidden, stream.run()
        if layer and layer not in stream.crossings:
            aside = stream.run(layer, before)
            sums = [b + c - a for a, b, c in zip(before, now, aside, strict=True)]
            errors.append(choose_layers.mean_of(choose_layers.relative_error, outputs, sums, bench.masks["guard"]))
        elif layer:
            errors.append(float("inf"))
        bench.teacher.empty(layer)
        before = now
        stream.advance(outputs)
    return [*errors, float("inf")]


def candidates(bench: Any) -> tuple[list[Candidate], dict[str, Any]]:
    """Layers to fuse, and the numbers behind them."""
    plan = bench.plan
    for a, b in zip(plan.before.stages, plan.after.stages, strict=True):
        check(a, b)
    fuse_layers.norms_of(bench.source)  # a reason against it is said before long work
    errors = pair_errors(bench)
    fused: list[int] = []
    for stage, after in zip(choose_layers.ranges(plan.before), plan.after.stages, strict=True):
        fused += fuse_layers.choose_pairs(errors, stage, len(stage) - after.depth)
    kept = tuple(i for i in range(plan.before.depth) if i - 1 not in fused)
    evidence = {"pair_errors": [None if e == float("inf") else round(e, 6) for e in errors]}
    return [Candidate(kept, "fuse", fused=tuple(fused))], evidence
