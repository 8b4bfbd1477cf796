"""Grow a local fit around the cuts of a finished candidate (`local_fit`), and keep it if the model's output improves.

While the layers are made, the student stores its state before every cut (`CutMark`) and the source's output behind the
blocks at which a span may end. Afterwards only the span's blocks are filled, fitted and kept. The output of the whole
model on the guard samples then decides between before and after. Imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from leansurgeon.checkpoints.blockwise.stream import Stream
from leansurgeon.checkpoints.recorded.decided import CutFit, Fit, GuardScore, LocalFit, SpanFit
from leansurgeon.errors import plural
from leansurgeon.measure.data.batches import Batch, rows_of, some_rows
from leansurgeon.progress import track
from leansurgeon.surgery.candidate_model import CandidateModel
from leansurgeon.surgery.candidates import CutMark
from leansurgeon.surgery.context import PARTS, CalibrationContext, SampleView
from leansurgeon.surgery.local_fit import (
    EPOCHS,
    LEAST_GAIN,
    STEP_TOKENS,
    WARMUP,
    Example,
    Phase,
    TimeLimit,
    fit_span,
)
from leansurgeon.surgery.score import judge

PASSES = 5.0  # of the source over all samples; bound on the steps of all spans if each improves at once


def share_of_steps(marks: Sequence[CutMark], depth: int, fit: float, guard: float, pieces: int) -> float:
    """Return the share of their steps that spans may take, so that all together cost at most `PASSES`. `fit` and
    `guard` count tokens; the fit samples come in `pieces`.
    """
    steps = block_steps(marks, pieces)
    return min(1.0, PASSES * depth * (fit + guard) / max(1.0, 3 * steps * fit / pieces))


def block_steps(marks: Sequence[CutMark], pieces: int) -> int:
    """Return the steps of all spans if each improves at once, counted per block of a span, for this many fit pieces."""
    return sum(
        min(phase.steps, EPOCHS * pieces) * (end - mark.first + 1)
        for mark in marks
        for phase, end in zip(mark.phases, mark.ends, strict=False)
    )


class SpanFitter:
    """The local fit of one candidate; its changes go to `edits`."""

    def __init__(self, context: CalibrationContext, view: SampleView, student: CandidateModel) -> None:
        self.context, self.view, self.student, self.edits = context, view, student, context.new_edits()
        self.clock = TimeLimit(context.method.heal_time)
        self.skeleton = student.skeleton
        self.later = 0.0  # block-tokens reserved for what comes after the current span

    def fill(self, layer: int) -> None:
        """Fill a block of the result with all changes so far."""
        tensors = self.student.tensors(layer)
        for held in (self.student.edits, self.edits):
            tensors |= {name: held[name] for name in tensors if name in held}
        self.skeleton.fill(layer, tensors)

    def advance(self, stream: Stream, until: int) -> Stream:
        """Return a copy of the stream, advanced through the blocks before `until`."""
        stream = copy(stream)
        while stream.at < until:
            layer = stream.at
            self.fill(layer)
            stream.advance(stream.run())
            self.skeleton.empty(layer)
        return stream

    def run(self) -> tuple[CutFit, ...]:
        """Fit around every cut, from the first to the last. Return the numbers for the record."""
        record = []
        behind: CutMark | None = None
        tokens = {part: self.context.tokens(self.view.batches[part]) for part in PARTS}
        states = self.student.marks[0].streams["fit"].hidden
        pieces = sum(len(row_sizes(b, h)) for b, h in zip(self.view.batches["fit"], states, strict=True))
        depth = self.context.plan.before.depth
        share = share_of_steps(self.student.marks, depth, tokens["fit"], tokens["guard"], pieces)
        before: dict[int, dict[str, Stream]] = {}  # by the layer that they stand before, as earlier fits left them
        for number, mark in enumerate(track(self.student.marks, "local fit, spans", "spans/s")):
            if mark.first in before:  # the cuts of a stage once more, together
                mark.streams = before[mark.first]
            elif behind is not None and mark.first > behind.first:  # an earlier fit has changed its input
                mark.streams = {part: self.advance(behind.streams[part], mark.first) for part in PARTS}
            before[mark.first] = mark.streams
            phases = [replace(phase, steps=max(1, round(share * phase.steps))) for phase in mark.phases]
            self.later = tokens["guard"] * (self.context.plan.after.depth - self.student.marks[0].first)
            for other in self.student.marks[number + 1 :]:
                layers, steps = other.ends[0] - other.first + 1, min(other.phases[0].steps * share, EPOCHS * pieces)
                self.later += layers * (3 * steps * tokens["fit"] / pieces + 2 * tokens["guard"])
                self.later += sum(tokens.values()) * max(0, other.first - mark.first)
            record.append(CutFit(mark.first, self.grow(mark, phases, f"span-{number}")))
            behind = mark
        return tuple(record)

    def grow(self, mark: CutMark, phases: Sequence[Phase], name: str) -> tuple[SpanFit, ...]:
        """Fit the span of one cut, growing it while the guard improves. `name` is that of the saved step."""
        if step := self.context.state.get(name):
            self.context.go_on_from(step)
            self.edits.update(step.tensors)
            self.context.held_back += step.record["held_back"]
            return tuple(map(SpanFit.from_dict, step.record["spans"]))
        pieces = {part: SamplePieces.of(self, mark, part) for part in PARTS}
        filled = []
        known = len(self.context.held_back)
        fits = []
        longest = self.context.longest_span
        for phase, end in zip(phases, mark.ends, strict=False):
            length = end - mark.first + 1
            if length > longest or not self.most(pieces, length, phase.steps):
                why = ", for its size" if length > longest else ""
                self.context.held_back.append(f"the local fit of {length} layers{why}")
                break
            while len(filled) < length:
                self.fill(mark.first + len(filled))
                filled.append(mark.first + len(filled))
            fitted = self.fit(filled, pieces, mark.goals[end], phase)
            self.context.say(
                f"  local fit of {plural(len(filled), 'new layer')} from {filled[0]} on: error on guard samples "
                f"{fitted.guard_before:.4f}, now {min(fitted.guard_before, fitted.guard_after):.4f}"
            )
            before, after = (round(error, 6) for error in (fitted.guard_before, fitted.guard_after))
            shown = replace(fitted, guard_before=before, guard_after=after, seconds=round(fitted.seconds, 2))
            fits.append(SpanFit(end, shown))
            little = fitted.guard_after > fitted.guard_before * (1 - LEAST_GAIN)
            if not fitted.kept or little or self.clock.gone >= 1:
                break
        changed = {}
        for layer in filled:
            changed |= {t: values for t, values in self.skeleton.read(layer).items() if t in self.student.outs}
            self.skeleton.empty(layer)
        self.edits.update(changed)
        spans = [span.as_dict() for span in fits]
        self.context.keep(name, changed, {"spans": spans, "held_back": self.context.held_back[known:]})
        return tuple(fits)

    def most(self, pieces: Mapping[str, SamplePieces], layers: int, steps: int) -> int:
        """Return how many of these steps the bound on passes allows; 0 if hardly any."""
        guarded = 2 * layers * pieces["guard"].tokens
        room = self.context.most - self.context.work - self.later - guarded
        steps_left = int(min(steps, room / (3 * layers * pieces["fit"].tokens / len(pieces["fit"].hidden))))
        return 0 if steps_left < min(steps, WARMUP) else steps_left

    def fit(
        self, layers: list[int], pieces: Mapping[str, SamplePieces], goals: Mapping[str, list[Tensor]], phase: Phase
    ) -> Fit:
        """Train the blocks of `layers` by gradient descent to turn the `pieces` into the `goals`."""

        def most(steps: int) -> int:
            """Return how many of these steps may be taken, and record the rest as skipped."""
            steps_left = self.most(pieces, len(layers), steps)
            if steps_left < steps:
                self.context.held_back.append(
                    f"{steps - steps_left} of {steps} steps of the local fit of {len(layers)} layers"
                )
            return steps_left

        def forward(hidden: Tensor, stream: Stream, batch: int) -> Tensor:
            """Return the hidden states of one batch after the blocks."""
            for layer in layers:
                hidden = stream.call(batch, hidden, layer)
            return hidden

        parameters = [
            p for layer in layers for p in self.skeleton.block(layer).parameters() if p.dim() > 1 and p.requires_grad
        ]
        fit, guard = (pieces[part].examples(goals[part]) for part in PARTS)
        with torch.enable_grad():
            clock, device = self.clock.part(0.5), self.skeleton.device.type
            return fit_span(forward, parameters, fit, guard, phase, clock, device, most)


@dataclass(frozen=True)
class SamplePieces:
    """Samples of one part in pieces of about STEP_TOKENS tokens: the hidden states before a span, and masks."""

    stream: Stream
    sizes: list[list[int]]  # rows of the pieces of every batch
    hidden: list[Tensor]
    masks: list[Tensor | None]

    @classmethod
    def of(cls, growing: SpanFitter, mark: CutMark, part: str) -> SamplePieces:
        """Cut the part's batches into small ones of a few rows where possible."""
        batches, before = growing.view.batches[part], mark.streams[part]
        if "decoder_input_ids" in batches[0]:
            masks = growing.view.masks_at(part, growing.skeleton.shape.stage_of(mark.first))
            return cls(before, [[rows_of(b)] for b in batches], list(before.hidden), masks)
        sizes = [row_sizes(batch, hidden) for batch, hidden in zip(batches, before.hidden, strict=True)]
        small = [
            some_rows(batch, slice(end - rows, end))
            for batch, size in zip(batches, sizes, strict=True)
            for end, rows in zip(accumulate(size), size, strict=True)
        ]
        masks = [growing.context.calibration.mask(batch) for batch in small]
        return cls(Stream(growing.skeleton, small), sizes, split(before.hidden, sizes), masks)

    @property
    def tokens(self) -> int:
        """Tokens of all pieces as blocks count them."""
        return sum(hidden.numel() // hidden.shape[-1] for hidden in self.hidden)

    def examples(self, goals: list[Tensor]) -> list[Example]:
        """Return every piece with its goal and mask."""
        parts = zip(self.hidden, split(goals, self.sizes), self.masks, strict=True)
        return [Example(h, goal, mask, {"stream": self.stream, "batch": b}) for b, (h, goal, mask) in enumerate(parts)]


def row_sizes(batch: Batch, hidden: Tensor) -> list[int]:
    """Return the rows of the pieces of a batch. A batch stays whole if its hidden states are not rows of samples, or in
    an encoder-decoder: the decoder needs the encoder's output for all of it.
    """
    rows = rows_of(batch)
    if "decoder_input_ids" in batch or hidden.dim() < 3 or len(hidden) != rows:
        return [rows]
    each = max(1, STEP_TOKENS * hidden.shape[-1] // hidden[0].numel())
    return [min(each, rows - start) for start in range(0, rows, each)]


def split(states: list[Tensor], sizes: list[list[int]]) -> list[Tensor]:
    """Split the hidden states of batches into those of their pieces; whole batches are passed through."""
    return [
        part
        for state, size in zip(states, sizes, strict=True)
        for part in (state.split(size) if len(size) > 1 else [state])
    ]


def fit_locally(
    context: CalibrationContext, view: SampleView, student: CandidateModel, teacher: Stream, score: GuardScore
) -> tuple[LocalFit, GuardScore]:
    """Grow the local fit around the cuts of the winner, whose guard score is `score`, and keep the changes if the
    output improves. `teacher` stands behind the last block. Return what was done, and the final score.
    """
    growing = SpanFitter(context, view, student)
    spans = growing.run()
    first = min(student.marks, key=lambda mark: mark.first)
    behind = growing.advance(first.streams["guard"], context.plan.after.depth)
    (now,) = judge(context, view, teacher, [behind])
    kept = now.judged_by < score.judged_by
    if kept:
        student.edits.update(growing.edits)
    growing.edits.close()
    return LocalFit(spans, kept, score.judged_by, now.judged_by), now if kept else score
