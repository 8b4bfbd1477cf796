"""One candidate of calibrated surgery on its way through the layers, and the tensors that it changes. Imports torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from copy import copy
from dataclasses import replace

import numpy as np
from torch import Tensor

from leansurgeon.checkpoints.blockwise.stream import Stream
from leansurgeon.checkpoints.recorded.decided import MadeLayer
from leansurgeon.checkpoints.weights import Arrays
from leansurgeon.surgery.refit import heal_block
from leansurgeon.surgery.refit.block import check_finite, closing_norm, weight_of
from leansurgeon.surgery.refit.heal_block import BlockFit, Healed, Norm, Samples
from leansurgeon.surgery.walk.candidates import Candidate
from leansurgeon.surgery.walk.changes import behind_gap, course, ends
from leansurgeon.surgery.walk.ground import Ground, Lesson, View
from leansurgeon.surgery.walk.grow import marks
from leansurgeon.surgery.walk.kept import Edits, Step
from leansurgeon.surgery.walk.make_layer import Made, make
from leansurgeon.surgery.write.apply import Transfer
from leansurgeon.surgery.write.uncalibrated import SplitTensors, resizes_heads


class Student:
    """One candidate on its way: which layers it keeps, its hidden states, its changed tensors."""

    def __init__(self, ground: Ground, view: View, candidate: Candidate, edits: Edits, number: int = 0) -> None:
        self.ground, self.view = ground, view
        self.name = f"candidate-{number}" if view.seen == "all" else None  # of its steps that are kept
        self.candidate, self.kept, self.edits = candidate, candidate.kept, edits
        self.skeleton = ground.result(self.kept)
        self.streams = view.streams(self.skeleton)
        plan = replace(ground.plan, layers=self.kept)
        # Heads of another size; where they shrink, `make` puts better ones in the place of these.
        self.split = SplitTensors(plan) if resizes_heads(plan) else {}
        self.transfer = Transfer(plan, self.split)
        self.outs = {out.name: out for out in self.transfer.tensors()}
        self.names: dict[int | None, list[str]] = {}
        for name in self.outs:
            layer = self.skeleton.layer_of(self.skeleton.bare(name))
            self.names.setdefault(layer, []).append(name)
        self.at = 0
        self.waiting: tuple[int, Stream] | None = None  # pieces of the guard that others go before, and where they are
        self.cut = False  # whether layers went before here
        self.faithful = True  # its hidden states are the teacher's
        self.record: list[MadeLayer] = []
        self.ends = ends(self.kept, plan.before)
        self.behind_gap = behind_gap(self.kept, plan.before)
        self.cuts, self.near, self.last_healed = course(self.kept, plan, later=candidate.later)
        grows = ground.options.grows and view.seen == "all"
        self.marks = marks(self.kept, self.ends, self.behind_gap, ground) if grows else []

    @property
    def until(self) -> int | None:
        """The source layer behind which the next new layer stands."""
        return self.ends[self.at] if self.at < len(self.kept) else None

    @property
    def behind(self) -> int:
        """New layers behind the last one that is made or refitted."""
        return len(self.kept) - 1 - self.last_healed

    def tensors(self, layer: int) -> Arrays:
        """The tensors of a new layer as `apply` would write them without calibration."""
        return {name: self.outs[name].float32() for name in self.names[layer]}

    def measured_heads(self, layer: int) -> list[int] | None:
        """The heads that a source layer keeps by measured importance; None where the plan leaves them open."""
        spec = self.ground.spec(layer, "o")
        if (layer, spec.group) not in self.ground.plan.strength:
            return None
        return self.transfer.index(spec).head_maps[0].tolist()

    def take(self, lesson: Lesson) -> None:
        """Make the next new layer; `lesson` is what the teacher shows at the last layer that it stands for."""
        kept = self.kept[self.at]
        if kept in self.behind_gap:
            self.faithful = False
        cut, near = self.cuts[self.at], self.near[self.at]
        self.mark(lesson)
        self.cut |= cut
        if self.faithful and not cut and not near:
            outputs = lesson.outputs  # nothing has changed what this layer computes
            self.keep_split()
        elif self.makes:
            outputs = self.heal(lesson, kept, cut, near)
        else:
            outputs = self.passed()
            self.keep_split()
        self.faithful = outputs is lesson.outputs
        if self.at >= self.last_healed:
            self.streams.pop("fit", None)
        for part, stream in self.streams.items():
            stream.advance(list(outputs[part]))
        self.at += 1
        if self.at > self.last_healed and self.view.seen == "part" and self.waiting is None:
            self.wait()

    @property
    def makes(self) -> bool:
        """Whether the next layer is made, or passed through where it changes its input."""
        cut, near = self.cuts[self.at], self.near[self.at]
        return cut or near or self.heals(cut, near)

    def wait(self) -> None:
        """Only the first piece of the guard goes on."""
        whole = self.streams["guard"]
        self.waiting = self.at, whole.some(slice(1, None))
        self.streams["guard"] = whole.some(slice(1))

    def go_on(self, pieces: int) -> None:
        """So many of the pieces that wait are the guard now, where they wait; the others wait on."""
        self.at, rest = self.waiting
        self.waiting = self.at, rest.some(slice(pieces, None))
        self.streams = {"guard": rest.some(slice(pieces))}

    def pass_on(self) -> None:
        """Take the guard through the next layer, which is as it was, once more."""
        self.streams["guard"].advance(self.passed()["guard"])
        self.at += 1

    def mark(self, lesson: Lesson) -> None:
        """Note what a local fit around the cuts will need."""
        for mark in self.marks:
            if mark.first == self.at:
                mark.streams = {part: copy(stream) for part, stream in self.streams.items()}
            if self.at in mark.ends:
                mark.goals[self.at] = lesson.outputs

    def passed(self) -> Mapping[str, list[Tensor]]:
        """What the source's layer gives in this place."""
        self.ground.lend(self.skeleton, self.at, self.kept[self.at], lambda: self.tensors(self.at))
        outputs = {part: stream.run(self.at) for part, stream in self.streams.items()}
        check_finite(outputs["guard"], f"behind new layer {self.at}")
        return outputs

    def heal(self, lesson: Lesson, kept: int, cut: bool, near: bool) -> Mapping[str, list[Tensor]]:
        """Make and refit the next layer, or take what an interrupted cut has made; what it gives by part."""
        name = f"{self.name}-layer-{self.at}"
        if self.name and (step := self.ground.options.kept.get(name)):
            return self.taken(step)
        plain = self.fill_plain()
        stage = self.skeleton.shape.stage_of(self.at)
        samples = {
            part: Samples(stream, stream.hidden, lesson.outputs[part], self.view.masks_at(part, stage))
            for part, stream in self.streams.items()
        }
        exact = self.view.seen == "all" and self.ground.is_exact
        site = BlockFit(self.at, samples["fit"], samples["guard"], exact=exact)
        decided = MadeLayer(self.at, kept, lesson.layer)
        if near:
            made = self.make(lesson, site, kept)
            trimmed = {"heads": made.heads_trimmed, "mlp": made.units_trimmed}
            decided = replace(decided, split=made.split, **trimmed)
        healed = self.heals(cut, near)
        guard = None  # what the block gives of the guard, once that is known
        if healed:
            refitted = self.refit(lesson, site, cut, near)
            before = heal_block.error(site, site.guard) if refitted is None else refitted.before
            told = "no linear way to the output" if refitted is None else refitted.record
            decided = replace(decided, error_before=round(before, 6), refit=told)
            guard = refitted and refitted.guard
        outputs = self.outputs(guard)
        error = heal_block.error(site, site.guard, outputs["guard"])
        decided = replace(decided, error_after=round(error, 6))
        self.keep_changes(plain)
        self.skeleton.empty(self.at)
        self.record.append(decided)
        if self.name:
            changed = {tensor: self.edits[tensor] for tensor in self.names[self.at] if tensor in self.edits}
            self.ground.keep(name, changed, decided.as_dict())
        return outputs

    def outputs(self, guard: list[Tensor] | None = None) -> Mapping[str, list[Tensor]]:
        """What the filled layer gives, as far as it is needed; `guard` where it is known."""
        outputs = {"guard": self.streams["guard"].run(self.at) if guard is None else guard}
        if self.at < self.last_healed:
            outputs["fit"] = self.streams["fit"].run(self.at)
        for states in outputs.values():
            check_finite(states, f"behind new layer {self.at}")
        return outputs

    def taken(self, step: Step) -> Mapping[str, list[Tensor]]:
        """Fill the next layer as it was made before; what it gives by part."""
        self.skeleton.fill(self.at, {**self.tensors(self.at), **step.tensors})
        outputs = self.outputs()
        for tensor, values in step.tensors.items():
            self.edits.put(tensor, values)
        self.skeleton.empty(self.at)
        self.record.append(MadeLayer.from_dict(step.record))
        self.ground.go_on_from(step)
        return outputs

    def fill_plain(self) -> dict[str, bytes]:
        """Fill the next layer as `apply` would write it; digests of that, which take less memory than a block."""
        self.skeleton.fill(self.at, plain := self.tensors(self.at))
        return {name: digest(values) for name, values in plain.items()}

    def heals(self, cut: bool, near: bool) -> bool:
        """Whether the next layer is refitted. Behind a post-norm there is nothing to refit, unless the block takes over
        others.
        """
        way = cut or self.ground.source.architecture.norm == "pre"
        return self.ground.options.refits and way and (cut or near or (self.cut and self.candidate.later))

    def refit(self, lesson: Lesson, site: BlockFit, cut: bool, near: bool) -> Healed | None:
        """Refit the linear maps of a pre-norm block, else its closing norm after a cut; None where neither was done."""
        healed = heal_block.heal_pre_norm(site, attention=(cut or near) and self.candidate.attention)
        if healed is None and cut and (closing := teacher_norm(lesson)) is not None:
            return heal_block.absorb(replace(site, ridges=heal_block.POST_RIDGES), closing)
        return healed

    def make(self, lesson: Lesson, site: BlockFit, kept: int) -> Made:
        """Fill the block with what becomes of a source layer."""
        made = make(self.ground, lesson, site, kept, self.measured_heads(kept))
        if made.heads is not None:
            self.transfer.index(self.ground.spec(kept, "o")).choose_heads(np.array(made.heads))
        if made.units is not None:
            self.transfer.index(self.ground.spec(kept, "down")).units = np.array(made.units)
        self.skeleton.fill(self.at, {**self.tensors(self.at), **made.tensors})
        for part in made.solved:
            module = self.skeleton.projections(self.at)[0] if part.role == "o" else self.skeleton.mlp_down(self.at)
            weight_of(module).copy_(part.weight)
            if module.bias is not None:
                module.bias.data.copy_(part.bias)
        return made

    def keep_changes(self, plain: dict[str, bytes]) -> None:
        """Keep what differs from what `apply` would write without these edits (`plain`: the digests of that); of heads
        of another size all.
        """
        for name, values in self.skeleton.read(self.at).items():
            if name in plain and (name in self.split or digest(values) != plain[name]):
                self.edits.put(name, values)

    def keep_split(self) -> None:
        """Keep the exact heads of another size of a layer that is not healed."""
        for name in self.names[self.at]:
            if name in self.split:
                self.edits.put(name, self.split[name])


def digest(values: np.ndarray) -> bytes:
    """SHA-256 of the array's bytes."""
    return hashlib.sha256(np.ascontiguousarray(values)).digest()


def teacher_norm(lesson: Lesson) -> Norm | None:
    """The closing norm of the teacher's (filled) block; None where that is no plain LayerNorm."""
    stream, layer = lesson.streams["guard"], lesson.layer
    closing = closing_norm(stream.skeleton.block(layer), lambda: stream.call(0, stream.hidden[0], layer))
    return None if closing is None else Norm.of(closing)
