"""One candidate of calibrated surgery, built layer by layer, and the tensors that it changes: heads or MLP units
trimmed by their effect on the student's own activations, heads split into smaller ones, output projections refitted.
Imports torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from math import inf

import numpy as np
import torch
from torch import Tensor, nn

from leansurgeon.checkpoints.blockwise.stream import Stream
from leansurgeon.checkpoints.recorded.decided import MadeLayer, Split, Trim
from leansurgeon.checkpoints.weights import Arrays
from leansurgeon.surgery import canonical, probes, refit_block, split_heads, trim_units
from leansurgeon.surgery.candidates import Candidate, NewLayer, course, divides_heads, last_made, marks, stages_of
from leansurgeon.surgery.context import CalibrationContext, SampleView, TeacherOutputs
from leansurgeon.surgery.probes import check_finite, closing_norm, weight_of
from leansurgeon.surgery.refit_block import BlockFit, Samples
from leansurgeon.surgery.transfer import Transfer

RIDGES = (1e-3, 1e-2, 0.1, 1.0)
RIDGE = 0.1  # of the refit of W_o after heads are split


class CandidateModel:
    """A candidate in progress: the layers it keeps, its hidden states, its changed tensors."""

    def __init__(self, context: CalibrationContext, view: SampleView, candidate: Candidate, number: int) -> None:
        self.context, self.view = context, view
        self.candidate, self.kept = candidate, candidate.kept
        self.name = f"candidate-{number}" if view.seen == "all" else None  # of saved steps; a trial saves none
        self.edits = context.new_edits() if self.name else None
        self.skeleton = context.result(self.kept)
        self.streams = view.streams(self.skeleton)
        self.transfer = Transfer(replace(context.plan, layers=self.kept))
        self.outs = {out.name: out for out in self.transfer.tensors()}
        self.result = self.transfer.plan.result
        self.at = 0
        self.waiting: tuple[int, Stream] | None = None  # guard pieces not run yet, and the layer at which they wait
        self.cut = False  # whether layers before the current one were dropped
        self.faithful = True  # whether its hidden states equal the teacher's
        self.record: list[MadeLayer] = []
        self.layers = course(self.kept, context.plan)
        self.last_healed = last_made(self.layers, later=candidate.later)
        self.marks = marks(self.kept, context.plan) if context.method.grows and view.seen == "all" else []

    @property
    def until(self) -> int | None:
        """The last source layer that the next new layer stands for; None at the end."""
        return self.layers[self.at].until if self.at < len(self.layers) else None

    @property
    def behind(self) -> int:
        """Number of new layers behind the last one that is made or refitted."""
        return len(self.kept) - 1 - self.last_healed

    def tensors(self, layer: int) -> Arrays:
        """Return the tensors of a new layer as `transfer.apply` would write them without calibration."""
        return {spec.name: self.outs[spec.name].float32() for spec in self.result.by_layer[layer]}

    def take(self, teacher: TeacherOutputs) -> None:
        """Make the next new layer; `teacher` holds the teacher's states at the last source layer that it stands for."""
        new = self.layers[self.at]
        self.faithful &= not new.gap
        for mark in self.marks:  # what a local fit around the cuts will need
            if mark.first == self.at:
                mark.streams = {part: copy(stream) for part, stream in self.streams.items()}
            if self.at in mark.ends:
                mark.goals[self.at] = teacher.outputs
        self.cut |= new.cut
        if self.faithful and not new.changed:
            outputs = teacher.outputs  # the layer still computes the same
            self.keep_split()
        elif self.makes:
            outputs = self.heal(teacher, new)
        else:
            outputs = self.pass_source_through()
            self.keep_split()
        self.faithful = outputs is teacher.outputs
        if self.at >= self.last_healed:
            self.streams.pop("fit", None)
        for part, stream in self.streams.items():
            stream.advance(list(outputs[part]))
        self.at += 1
        if self.at > self.last_healed and self.view.seen == "part" and self.waiting is None:
            whole = self.streams["guard"]  # of which only the first piece continues
            self.waiting = self.at, whole.some(slice(1, None))
            self.streams["guard"] = whole.some(slice(1))

    @property
    def makes(self) -> bool:
        """Whether the next layer is changed or refitted (otherwise it is only passed through)."""
        return self.layers[self.at].changed or self.heals

    @property
    def heals(self) -> bool:
        """Whether the next layer is refitted. A post-norm block is refitted only if it replaces others."""
        new, pre_norm = self.layers[self.at], self.context.source.architecture.norm == "pre"
        asked = new.changed or (self.cut and self.candidate.later)
        return self.context.method.refits and asked and (new.cut or pre_norm)

    def pass_source_through(self) -> Mapping[str, list[Tensor]]:
        """Return the output of the source's layer in this place, by part of the samples."""
        self.context.lend(self.skeleton, self.at, self.kept[self.at], lambda: self.tensors(self.at))
        outputs = {part: stream.run(self.at) for part, stream in self.streams.items()}
        check_finite(outputs["guard"], f"behind new layer {self.at}")
        return outputs

    def heal(self, teacher: TeacherOutputs, new: NewLayer) -> Mapping[str, list[Tensor]]:
        """Make and refit the next layer, or load it from an interrupted cut. Return its output by sample part."""
        step_name = f"{self.name}-layer-{self.at}"
        if self.name and (step := self.context.state.get(step_name)):
            self.skeleton.fill(self.at, {**self.tensors(self.at), **step.tensors})
            outputs = self.outputs()
            self.edits.update(step.tensors)
            self.skeleton.empty(self.at)
            self.record.append(MadeLayer.from_dict(step.record))
            self.context.go_on_from(step)
            return outputs
        self.skeleton.fill(self.at, tensors := self.tensors(self.at))
        # To find changed tensors later; digests take less memory than a copy of the block.
        plain = {name: digest(values) for name, values in tensors.items()} if self.name else {}
        del tensors
        stage = self.skeleton.shape.stage_of(self.at)
        samples = {
            part: Samples(stream, stream.hidden, teacher.outputs[part], self.view.masks_at(part, stage))
            for part, stream in self.streams.items()
        }
        exact = self.view.seen == "all" and self.context.is_exact
        site = BlockFit(self.at, samples["fit"], samples["guard"], exact=exact)
        decided = MadeLayer(self.at, new.kept, teacher.layer)
        if new.near:
            decided = replace(decided, **self.make(teacher, site, new.kept))
        guard = None  # output of the block on the guard, once known
        if self.heals:
            refitted = refit_block.heal_pre_norm(site, attention=new.changed and self.candidate.attention)
            if refitted is None and new.cut:
                stream, layer = teacher.streams["guard"], teacher.layer  # the teacher's block is still filled
                closing = closing_norm(stream.skeleton.block(layer), lambda: stream.call(0, stream.hidden[0], layer))
                refitted = None if closing is None else refit_block.absorb(site, closing)
            before = refit_block.error(site, site.guard) if refitted is None else refitted.before
            told = "no linear way to the output" if refitted is None else refitted.record
            decided = replace(decided, error_before=round(before, 6), refit=told)
            guard = refitted and refitted.guard
        outputs = self.outputs(guard)
        error = refit_block.error(site, site.guard, outputs["guard"])
        decided = replace(decided, error_after=round(error, 6))
        self.record.append(decided)
        if self.name:
            made = self.skeleton.read(self.at)
            divided = self.transfer.split  # split tensors are all kept; of the others, those that differ
            changed = {n: v for n, v in made.items() if n in plain and (n in divided or digest(v) != plain[n])}
            self.edits.update(changed)
            self.context.keep(step_name, changed, decided.as_dict())
        self.skeleton.empty(self.at)
        return outputs

    def outputs(self, guard: list[Tensor] | None = None) -> Mapping[str, list[Tensor]]:
        """Return the outputs of the filled layer for the parts still needed. `guard` is passed if already known."""
        outputs = {"guard": self.streams["guard"].run(self.at) if guard is None else guard}
        if self.at < self.last_healed:
            outputs["fit"] = self.streams["fit"].run(self.at)
        for states in outputs.values():
            check_finite(states, f"behind new layer {self.at}")
        return outputs

    def make(self, teacher: TeacherOutputs, site: BlockFit, kept: int) -> dict[str, Split | Trim]:
        """Fill the block with the new form of source layer `kept`, and return the decisions. The source's block is
        filled in a separate skeleton (the workshop) and runs on the *student's* hidden states, so the choice accounts
        for how earlier layers have changed.
        """
        context, shop = self.context, self.context.workshop
        before, after = stages_of(context.plan, kept)
        context.fill(kept, shop)
        fit, guard = (
            replace(samples, stream=teacher.streams[part].through(shop))
            for part, samples in (("fit", site.fit), ("guard", site.guard))
        )
        work = replace(site, layer=kept, fit=fit, guard=guard)
        o, down = shop.projections(kept)[0], shop.mlp_down(kept)
        tensors = {}
        made = {}
        solved: dict[str, tuple[Tensor, Tensor | None]] = {}  # weight and bias of projections of the new layer
        if divides_heads(context.plan, kept):
            tensors, made["split"] = split(context, teacher, work, kept, self.at)
        elif after.heads < before.heads and after.head_dim == before.head_dim:
            maps = self.transfer.maps_of(context.spec(kept, "o"))
            measured = (kept, maps.group) in context.plan.strength  # the remaining heads are chosen already
            fixed = maps.heads.tolist() if measured else ()
            shared = 1 if measured or before.kv_heads == before.heads else before.kv_heads
            heads, note, solved["o"] = trim(work, o, before.head_dim, after.heads, shared, freeze=down, fixed=fixed)
            made["heads"] = replace(note, kept=tuple(heads))
            maps.choose_heads(np.array(heads))
        if after.mlp_dim < before.mlp_dim and len(shop.of_role(kept, "down")) == 1:  # several: units go by weight
            units, made["mlp"], solved["down"] = trim(work, down, 1, after.mlp_dim, 1)
            self.transfer.maps_of(context.spec(kept, "down")).units = np.array(units)
        shop.empty(kept)
        self.skeleton.fill(self.at, {**self.tensors(self.at), **tensors})
        for role, (weight, bias) in solved.items():
            module = self.skeleton.of_role(self.at, role)[0]
            weight_of(module).copy_(weight)
            if module.bias is not None:
                module.bias.data.copy_(bias)
        return made

    def keep_split(self) -> None:
        """Keep the exactly split heads of a layer that is not healed."""
        divided, names = self.transfer.split, (spec.name for spec in self.result.by_layer[self.at])
        if self.name:
            self.edits.update({name: divided[name] for name in names if name in divided})


def digest(values: np.ndarray) -> bytes:
    """Return the SHA-256 of the array's bytes."""
    return hashlib.sha256(np.ascontiguousarray(values)).digest()


# -- layers whose shape changes are not exact --------------------------------------------------------


def trim(
    work: BlockFit,
    module: nn.Module,
    group: int,
    keep: int,
    shared: int,
    freeze: nn.Module | None = None,
    fixed: Sequence[int] = (),
) -> tuple[list[int], Trim, tuple[Tensor, Tensor | None]]:
    """Trim a projection in place, with the ridge that does best on the guard; remaining columns are solved anew or left
    as they are. `fixed` lists the groups that stay, if they are chosen already. Return the groups that stay, the
    numbers for the record, and weight and bias without the removed inputs.
    """
    scale = probes.reach(module, work.first, freeze=freeze)
    sums = [refit_block.refit_sums(work, part, module, scale) for part in (work.fit, work.guard)]
    old, gram, worth = weight_of(module).double().cpu(), sums[0].gram.cpu(), sums[0].worth.cpu()
    error, best = inf, None
    for ridge in RIDGES:
        solution = sums[0].solve(ridge).cpu()
        trimmed = trim_units.trim(gram, solution, old, group, keep, ridge, worth, shared, fixed)
        plain = torch.zeros_like(trimmed.change)
        gone = sorted(set(range(old.shape[1] // group)) - set(trimmed.kept))
        at = trim_units.inputs_of(gone, group)
        plain[at] = -old.T[at]
        for solved, way in ((True, trimmed), (False, replace(trimmed, change=plain))):
            if (now := sums[1].error(way.change)) < error or best is None:
                error, best, chosen = now, way, (ridge, solved)
    inputs = old.shape[1]
    probes.add_to(module, best.change[:inputs].T.float(), None if module.bias is None else best.change[inputs].float())
    tokens = max(1.0, sums[1].tokens)
    errors = (round((each / tokens) ** 0.5, 6) for each in (sums[1].error(), error))
    left = weight_of(module)[:, trim_units.inputs_of(best.kept, group)].clone()
    bias = None if module.bias is None else module.bias.data.clone()
    return best.kept, Trim(*chosen, *errors), (left, bias)


def split(
    context: CalibrationContext, teacher: TeacherOutputs, work: BlockFit, kept: int, new: int
) -> tuple[dict[str, np.ndarray], Split]:
    """Split heads with `split_heads`. Return the attention's tensors of new layer `new`, and the numbers for the
    record.

    If no layer is dropped behind this one, W_o is refitted to the teacher's own state behind the attention, which also
    corrects the error of earlier layers; otherwise to the parent's output for the same inputs.
    """
    source, plan = context.source, context.plan
    before, after = stages_of(plan, kept)
    skeleton, hidden = work.fit.stream.skeleton, work.fit.hidden
    reads = next(m[0] for role in ("q", "qkv", "qk") if (m := skeleton.of_role(kept, role)))
    inputs = [probes.capture_input(reads, lambda b=b: work.run(work.fit, b)).cpu() for b in range(len(hidden))]
    goals = None
    if teacher.layer == kept:
        states = zip(teacher.attention, teacher.streams["fit"].hidden, hidden, strict=True)
        goals = [gave.cpu() + wanted.cpu() - student.cpu() for gave, wanted, student in states]
    made, numbers = split_heads.activation_aware(
        canonical.unpack(canonical.of_attention(context.by_layer[kept]), before, source.weights.float32),
        inputs,
        work.fit.masks,
        after,
        causal=context.causal,
        targets_BTW=goals,
        score_scale=canonical.score_scale(source, before),
        gain=canonical.score_gain(source, before, after),
        ridge=RIDGE if context.method.refits else None,
    )
    return canonical.pack(made, canonical.of_attention(plan.target.by_layer[new])), numbers
