"""One candidate of calibrated surgery on its way through the layers, and the tensors that it changes. Imports torch."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from leansurgeon.checkpoints.stream import Stream
from leansurgeon.checkpoints.weights import to_float32
from leansurgeon.shape import Shape, Stage
from leansurgeon.surgery.layer.uncalibrated import SplitTensors, resizes_heads
from leansurgeon.surgery.refit import heal_block
from leansurgeon.surgery.refit.block import check_finite, closing_norm
from leansurgeon.surgery.refit.heal_block import Norm, Samples, Site
from leansurgeon.surgery.walk import choose_layers
from leansurgeon.surgery.walk.candidates import Candidate
from leansurgeon.surgery.walk.make_layer import is_near, make
from leansurgeon.surgery.write.apply import Transfer

if TYPE_CHECKING:
    from leansurgeon.surgery.walk.calibrated import Bench

PARTS = ("fit", "guard")


class Edits(Mapping[str, np.ndarray]):
    """Changed tensors of the result in float32, by file name, on disk. `close` removes them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, {}

    def put(self, name: str, values: np.ndarray) -> None:
        file = self.folder / f"{len(self.files)}.npy" if name not in self.files else self.files[name]
        np.save(file, np.ascontiguousarray(values, np.float32))
        self.files[name] = file

    def __getitem__(self, name: str) -> np.ndarray:
        return np.load(self.files[name], mmap_mode="r")

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class Student:
    """One candidate on its way: which layers it keeps, its hidden states, its changed tensors."""

    def __init__(self, bench: Bench, candidate: Candidate, edits: Edits) -> None:
        self.bench, self.candidate, self.kept, self.edits = bench, candidate, candidate.kept, edits
        self.skeleton = bench.student_of(self.kept)
        self.streams = {part: Stream(self.skeleton, bench.batches[part]) for part in PARTS}
        plan = replace(bench.plan, layers=self.kept)
        # Heads of another size; where they shrink, `make` puts better ones in the place of these.
        self.split = SplitTensors(plan, bench.source) if resizes_heads(plan) else {}
        self.transfer = Transfer(plan, bench.source, self.split)
        self.outs = {out.name: out for out in self.transfer.tensors()}
        self.names: dict[int, list[str]] = {}
        for name in self.outs:
            layer = self.skeleton.layer_of(self.skeleton.bare(name))
            self.names.setdefault(layer, []).append(name)
        self.at = 0
        self.cut = False  # whether layers went before here
        self.faithful = True  # its hidden states are the teacher's
        self.record: list[dict[str, Any]] = []
        self.ends = ends(self.kept, bench.plan.before)
        self.behind_gap = behind_gap(self.kept, bench.plan.before)

    @property
    def until(self) -> int | None:
        """The source layer behind which the next new layer stands."""
        return self.ends[self.at] if self.at < len(self.kept) else None

    def tensors(self, layer: int) -> dict[str, np.ndarray]:
        """The tensors of a new layer as `apply` would write them without calibration."""
        found = {}
        for name in self.names[layer]:
            out = self.outs[name]
            if out.make is not None:
                found[name] = to_float32(out.make(), out.dtype)
            else:
                found[name] = self.bench.source.weights.float32(self.bench.names[id(out.entry)])
        return found

    def choose_heads(self, layer: int, kept: np.ndarray, before: Stage) -> None:
        """Let a source layer keep these heads, instead of those that the weights alone suggest."""
        index = self.transfer.index(next(s for s in self.bench.source.specs if s.layer == layer and s.role == "o"))
        values = np.unique(kept // (before.heads // before.kv_heads))  # the groups that keep any
        vars(index)["head_maps"] = (kept, values)

    def measured_heads(self, layer: int) -> list[int] | None:
        """The heads that a source layer keeps by measured importance; None where the plan leaves them open."""
        spec = next(s for s in self.bench.source.specs if s.layer == layer and s.role == "o")
        if (layer, spec.group) not in self.bench.plan.strength:
            return None
        return self.transfer.index(spec).head_maps[0].tolist()

    def choose_units(self, layer: int, kept: np.ndarray) -> None:
        index = self.transfer.index(next(s for s in self.bench.source.specs if s.layer == layer and s.role == "down"))
        vars(index)["units"] = kept

    def take(self, layer: int, teacher: dict[str, list[Tensor]]) -> None:
        """Make the next new layer; `teacher` is what source layer `layer` gave."""
        kept = self.kept[self.at]
        if kept in self.behind_gap:
            self.faithful = False
        cut = kept != layer or kept in self.behind_gap
        near = is_near(self.bench.plan, kept)
        if self.faithful and not cut and not near:
            outputs = teacher  # nothing has changed what this layer computes
            self.keep_split()
        else:
            self.cut |= cut
            outputs = self.heal(layer, kept, cut, near, teacher)
        self.faithful = outputs is teacher
        for part, hidden in outputs.items():
            self.streams[part].advance(list(hidden))
        self.at += 1

    def heal(self, layer: int, kept: int, cut: bool, near: bool, teacher: dict) -> dict:
        options, skeleton = self.bench.options, self.skeleton
        skeleton.fill(self.at, plain := self.tensors(self.at))
        plain = {name: digest(values) for name, values in plain.items()}  # a block less in memory
        samples = {
            part: Samples(stream, stream.hidden, teacher[part], self.bench.masks[part])
            for part, stream in self.streams.items()
        }
        site = Site(self.at, samples["fit"], samples["guard"])
        decided: dict[str, Any] = {"layer": self.at, "from": kept, "until": layer}
        if kept in self.candidate.fused:
            from leansurgeon.surgery.walk.make_fused import make_fused

            decided |= make_fused(self, site, kept)
        elif near:
            decided |= make(self, site, kept)
        # Behind a post-norm there is nothing to refit, unless the block takes over others.
        way = cut or self.bench.source.architecture.norm == "pre"
        healed = options.heal and way and (cut or near or (self.cut and self.candidate.later))
        if healed:
            decided["error_before"] = round(heal_block.error(site, site.guard), 6)
            found = heal_block.heal_pre_norm(site, attention=(cut or near) and self.candidate.attention)
            if found is None and cut:
                post = replace(site, ridges=heal_block.POST_RIDGES)
                closing = self.teacher_norm(layer)
                found = None if closing is None else heal_block.absorb(post, closing)
            decided["refit"] = found or "no linear way to the output"
        if options.fit and (cut or near):
            from leansurgeon.surgery.refit import local_fit

            with torch.enable_grad():
                decided["fit"] = local_fit.fit_block(site, options.fit)
        last = self.at + 1 == len(self.kept)  # behind it only the guard is looked at
        outputs = {part: s.stream.run(self.at, s.hidden) for part, s in samples.items() if part == "guard" or not last}
        for found in outputs.values():
            check_finite(found, f"behind new layer {self.at}")
        decided["error_after"] = round(heal_block.error(site, site.guard, outputs["guard"]), 6)
        self.keep_changes(plain)
        skeleton.empty(self.at)
        if cut or near or healed:
            self.record.append(decided)
        return outputs

    def teacher_norm(self, layer: int) -> Norm | None:
        """The closing norm of the teacher's (filled) block; None where that is no plain LayerNorm."""
        bench = self.bench
        stream = Stream(bench.teacher, bench.batches["guard"][:1])
        found = closing_norm(bench.teacher.block(layer), lambda: stream.call(0, stream.hidden[0], layer))
        return None if found is None else Norm.of(found)

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
    return hashlib.sha256(np.ascontiguousarray(values)).digest()


def behind_gap(kept: tuple[int, ...], before: Shape) -> set[int]:
    """The kept layers that are the first of their stage in the result and not in the source: no kept layer stands
    before the gap that could take over what went, so these have to.
    """
    firsts = [
        (stage.start, next((i for i in kept if i in stage), stage.start)) for stage in choose_layers.ranges(before)
    ]
    return {first for start, first in firsts if first > start}


def ends(kept: tuple[int, ...], before: Shape) -> list[int]:
    """For every kept layer the last source layer that it stands for: the one before the next kept, or the end of its
    stage.
    """
    found = []
    for stage in choose_layers.ranges(before):
        here = [i for i in kept if i in stage]
        found += [following - 1 for following in [*here[1:], stage.stop]] if here else []
    return found
