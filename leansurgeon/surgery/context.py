"""What all candidates of a calibrated surgery stand on: the plan, the source that is only read, the models that their
blocks are filled into, and the sample data that is looked at. Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from leansurgeon.architectures.base import Architecture, Config, TensorSpec
from leansurgeon.checkpoints.blockwise.skeleton import Skeleton
from leansurgeon.checkpoints.blockwise.stream import Stream
from leansurgeon.checkpoints.kind import body_class, class_name
from leansurgeon.checkpoints.publish.durable import scratch
from leansurgeon.checkpoints.recorded.decided import Tried
from leansurgeon.checkpoints.weights import Arrays
from leansurgeon.measure.data.batches import Batch, in_pieces, rows_of, some, some_rows, tokens_of
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.progress import Say, silent
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.surgery.budget import ALL, CHOICE, LEAST, Effort, cost
from leansurgeon.surgery.candidates import Candidate, is_near, stages_of
from leansurgeon.surgery.local_fit import products
from leansurgeon.surgery.next_steps import LayerPattern, pattern_of
from leansurgeon.surgery.planning import Plan
from leansurgeon.surgery.probes import flat, relative_error
from leansurgeon.surgery.resume import Edits, ResumeState, Step

PARTS = ("fit", "guard")
STREAMS, SHARE = 16, 0.3  # times all hidden states are at hand, and which share of a GPU's memory they may take
TRAINED = 5  # copies of a block's weights while it is fitted: values, gradients, two of Adam, and the way back
FITTED = 8 * 2**30  # bytes that blocks may take while they are fitted, and more only where the weights are more
JUDGED = 32  # images at least that sets of layers are judged on: a classifier says one thing of each
AGREES = 0.03  # relative error of the source's last hidden states by products in bf16
Streams: TypeAlias = dict[str, Stream]  # by part of the samples


@dataclass(frozen=True)
class SampleView:
    """The part of the sample data that is looked at: batches and their masks by part, and whether that is all."""

    seen: str  # "part" or "all"
    batches: Mapping[str, list[Batch]]
    masks: Mapping[str, list[Tensor | None]]
    answers: Mapping[str, list[Tensor | None]]  # of what a decoder beside an encoder reads; else the same

    @classmethod
    def of(cls, calibration: Calibration, tokens: Mapping[str, int] | None) -> SampleView:
        """So many tokens of every part, in whole batches (None: all), and `JUDGED` of the guard at least."""
        first = calibration.guard[0]
        if tokens and "input_ids" not in first:
            tokens = {**tokens, "guard": max(tokens["guard"], JUDGED * tokens_of(first) // rows_of(first))}
        batches = {part: some(getattr(calibration, part), tokens and tokens[part]) for part in PARTS}
        if tokens:
            batches["guard"] = in_pieces(batches["guard"])
        masks = {part: [calibration.mask(b) for b in batches[part]] for part in PARTS}
        answers = {part: [calibration.answer_mask(b) for b in batches[part]] for part in PARTS}
        return cls("part" if tokens else "all", batches, masks, answers)

    def masks_at(self, part: str, stage: int) -> list[Tensor | None]:
        """The masks of hidden states in a stage."""
        return self.answers[part] if stage else self.masks[part]

    def streams(self, skeleton: Skeleton) -> Streams:
        """New streams of all parts before the first block of a skeleton."""
        return {part: Stream(skeleton, batches) for part, batches in self.batches.items()}


@dataclass(frozen=True)
class TeacherOutputs:
    """What the teacher shows at one layer, whose block is filled: its streams before it, what the block gave by part,
    and what its attention alone gave on the samples to fit, where that was asked for.
    """

    layer: int
    streams: Mapping[str, Stream]
    outputs: Mapping[str, list[Tensor]]
    attention: list[Tensor]


class CalibrationContext:
    """The plan, the source as the teacher, and skeletons of the result. Raises `UnsupportedModel` for a source that
    cannot be run block by block.
    """

    def __init__(
        self,
        plan: Plan,
        calibration: Calibration,
        say: Say = silent,
        device: str = "cpu",
        state: ResumeState | None = None,
        held: ExitStack | None = None,
    ) -> None:
        """Finished steps go to `state`; `held`: how long changed tensors lie on disk."""
        self.plan, self.method, self.source, self.target = plan, plan.method, plan.source, plan.target
        self.calibration, self.state, self.say = calibration, state or ResumeState(), say
        self.samples = {part: getattr(calibration, part) for part in PARTS}
        self.held = held or ExitStack()
        self.tried: list[Tried] = []  # candidates with their scores
        self.skeletons: list[Skeleton] = []  # all, whose work counts
        self.earlier = 0.0  # block-tokens that an interrupted cut had done before its last step that was taken over
        self.taken = 0  # such steps
        self.held_back: list[str] = []  # what the bounds on passes left out
        self.cast: Callable[[], AbstractContextManager] = nullcontext  # how all skeletons take products
        self.device = torch.device(device)
        self.teacher = self.skeleton_of(self.source.config, self.source.architecture)
        self.teacher.fill_outer(self.source.weights.float32)
        self.results: dict[tuple[int, ...], Skeleton] = {}
        self.lent: tuple[Skeleton, int, int] | None = None  # a filled block of a result, and the source's layer in it
        self.result(plan.layers)
        # BERT's classes are causal where their config makes them decoders.
        arch = self.source.architecture
        self.causal = arch.causal or bool(self.source.flat_config.get("is_decoder"))
        self.by_layer: dict[int | None, list[TensorSpec]] = {}
        for spec in self.source.specs:
            self.by_layer.setdefault(spec.layer, []).append(spec)

    def skeleton_of(self, config: Config, architecture: Architecture) -> Skeleton:
        """An empty model on the device, whose hidden states rest where there is room for them."""
        if not self.source.has_head:
            used = body_class(architecture, class_name(self.source.used_config))
            config = config | {"architectures": [used]}
        skeleton = Skeleton(config, architecture, self.device)
        skeleton.home, skeleton.cast = self.home, lambda: self.cast()
        self.skeletons.append(skeleton)
        return skeleton

    def new_edits(self) -> Edits:
        """No changed tensors yet, in a folder of their own."""
        return Edits(self.held.enter_context(scratch()))

    @cached_property
    def home(self) -> torch.device:
        """The device, or the host's memory where several times all hidden states would fill too much of the other."""
        if self.device.type != "cuda":
            return self.device
        width = max(stage.width for stage in self.plan.before.stages)
        size = 4 * width * sum(tokens_of(batch) for batches in self.samples.values() for batch in batches)
        room = torch.cuda.get_device_properties(self.device).total_memory
        return self.device if STREAMS * size < SHARE * room else torch.device("cpu")

    @cached_property
    def longest_span(self) -> int:
        """Blocks that are trained together at most. That follows from the model alone, so that no other machine makes
        another result: they take as much memory as the weights do in their file, or `FITTED` where that is more.
        """
        block = max(sum(p.numel() for p in self.teacher.block(i).parameters()) for i in range(self.teacher.depth))
        entries = (self.source.weights.entries[spec.name] for spec in self.source.specs)
        return max(FITTED, sum(entry.end - entry.start for entry in entries)) // (4 * TRAINED * block)

    def choose_products(self) -> None:
        """Products in bf16 from now on where the device has them and the guard agrees: on a GPU in every cut, on a CPU
        where layers go, which loses a hundred times what rounding does.
        """
        if self.device.type == "cuda" or self.plan.before.depth != self.plan.after.depth:
            cast = products(max(stage.width for stage in self.plan.before.stages), self.device.type)
            if cast is not nullcontext and self.disagreement(cast) < AGREES:
                self.cast = cast

    @property
    def is_exact(self) -> bool:
        """Whether sums are worth float64: hidden states are not rounded, and the device is no slower in it."""
        return self.cast is nullcontext and self.device.type == "cpu"

    def disagreement(self, cast: Callable[[], AbstractContextManager]) -> float:
        """Relative error of the source's last hidden states on the first guard samples with products taken so."""
        batch = self.calibration.guard[0]
        plain, rounded = (Stream(self.teacher, [batch]) for _ in range(2))
        for layer in range(self.teacher.depth):
            self.fill(layer)
            plain.advance(plain.run())
            self.cast = cast
            rounded.advance(rounded.run())
            self.cast = nullcontext
            self.teacher.empty(layer)
        mask = self.calibration.answer_mask(batch)
        return float(relative_error(*(flat(stream.hidden[0], mask) for stream in (plain, rounded))).mean())

    @property
    def heals(self) -> bool:
        """Whether there is anything to heal."""
        layers = range(self.plan.before.depth)
        changed = self.plan.before.depth != self.plan.after.depth or any(is_near(self.plan, i) for i in layers)
        return self.method.refits and changed

    @property
    def work(self) -> float:
        """Block-tokens of what was done so far, embeddings and heads left out; a training step counts three times."""
        return self.earlier + sum(skeleton.work for skeleton in self.skeletons)

    @cached_property
    def one_pass(self) -> float:
        """Block-tokens of one forward pass of the source over the samples to fit and to guard."""
        return self.plan.before.depth * sum(map(self.tokens, self.samples.values()))

    def passes(self) -> float:
        """What was done so far, in forward passes of the source over the samples to fit and to guard."""
        return self.work / self.one_pass

    @property
    def most(self) -> float:
        """Block-tokens that the whole cut may take."""
        return self.work_allowed(ALL)

    @property
    def most_closed(self) -> float:
        """Block-tokens that choice and closed refit may take. Layers that the plan makes anew whatever is chosen (fewer
        heads, fewer units) come on top of the bound, once.
        """
        return min(self.most, self.anew + self.work_allowed(CHOICE))

    def work_allowed(self, passes: float) -> float:
        """Block-tokens of so many passes, over `LEAST` tokens at least."""
        return passes * max(self.one_pass, self.plan.before.depth * LEAST)

    @cached_property
    def anew(self) -> float:
        """Block-tokens of making every layer once, where the plan makes them anew whatever is chosen."""
        if not any(is_near(self.plan, i) for i in self.plan.layers):
            return 0.0
        return self.cost(Candidate(self.plan.layers, ""), self.samples)

    def cost(self, way: Candidate, batches: Mapping[str, list[Batch]], share: float = 1.0) -> float:
        """Block-tokens that a candidate takes on these samples beside the source's own."""
        tokens = (self.tokens(some) for some in (batches["fit"], batches["guard"], batches["guard"][:1]))
        effort = Effort(*tokens, self.heals, self.source.architecture.norm == "pre", self.attentions)
        return cost(self.plan, way, effort, share)

    @cached_property
    def pattern(self) -> LayerPattern | None:
        """By which a format outside reads the source's layers, if there is one."""
        return pattern_of(self.source.architecture, self.source.config)

    def breaks_pattern(self, kept: Sequence[int]) -> bool:
        """Whether that format would take these layers for others."""
        return self.pattern is not None and not self.pattern.holds(kept)

    @cached_property
    def attentions(self) -> int:
        """Attentions in one layer."""
        return max(len(self.teacher.projections(layer)) for layer in range(self.teacher.depth))

    def tokens(self, batches: list[Batch]) -> float:
        """Tokens of some batches as blocks count them, on average over all layers."""
        if "decoder_input_ids" in batches[0]:
            encoder, decoder = (sum(b[key].numel() for b in batches) for key in ("input_ids", "decoder_input_ids"))
            first = self.plan.before.stages[0].depth
            return (first * encoder + (self.plan.before.depth - first) * decoder) / self.plan.before.depth
        return sum(b["input_ids"].numel() if "input_ids" in b else self.patches * rows_of(b) for b in batches)

    @cached_property
    def patches(self) -> float:
        """Tokens of an image on average over all layers: a pyramid's later stages have fewer."""
        batch = some_rows(self.calibration.guard[0], slice(1))
        stream, tokens = Stream(self.teacher, [batch]), 0.0
        for _ in range(self.teacher.depth):
            tokens += stream.hidden[0].numel() / stream.hidden[0].shape[-1]
            stream.advance(stream.hidden)
        return tokens / self.teacher.depth

    def go_on_from(self, step: Step) -> None:
        """A step of an interrupted cut is taken over: its work counts, so that bounds allow what they would have."""
        self.earlier += step.work - self.work
        self.taken += 1

    def keep(self, name: str, tensors: Mapping[str, np.ndarray], record: JsonObject) -> None:
        """Keep a finished step."""
        self.state.put(name, Step(tensors, record, self.work))

    def spec(self, layer: int, role: str) -> TensorSpec:
        """The first source tensor of a role in a layer."""
        return next(s for s in self.by_layer[layer] if s.role == role)

    def fill(self, layer: int, skeleton: Skeleton | None = None) -> None:
        """A block of the source, in the teacher or in another skeleton of it."""
        tensors = {spec.name: self.source.weights.float32(spec.name) for spec in self.by_layer[layer]}
        (skeleton or self.teacher).fill(layer, tensors)

    def beside(self, config: Config, architecture: Architecture) -> Skeleton:
        """A skeleton that shares with the teacher what stands outside the blocks."""
        skeleton = self.skeleton_of(config, architecture)
        skeleton.share_outer(self.teacher)
        return skeleton

    def result(self, kept: tuple[int, ...]) -> Skeleton:
        """A skeleton of the result. One serves all candidates, unless the config lists something for every layer."""
        key = kept if self.target.architecture.per_layer else ()
        if key not in self.results:
            self.results[key] = self.beside(self.target.config(kept), self.target.architecture)
        return self.results[key]

    def lend(self, skeleton: Skeleton, at: int, layer: int, tensors: Callable[[], Arrays]) -> None:
        """Fill a block of a result that is source layer `layer` as it is, if it is not: all candidates behind their
        cuts need the same one. It stays so until `give_back`.
        """
        alike = replace(stages_of(self.plan, layer)[0], depth=0) == replace(stages_of(self.plan, layer)[1], depth=0)
        if self.lent != (skeleton, at, layer) or not alike:
            self.give_back()
            skeleton.fill(at, tensors())
            self.lent = skeleton, at, layer

    def give_back(self) -> None:
        """Empty the block that was lent."""
        if self.lent is not None:
            self.lent[0].empty(self.lent[1])
            self.lent = None

    @cached_property
    def workshop(self) -> Skeleton:
        """The source once more, its blocks for those who change them."""
        return self.beside(self.source.config, self.source.architecture)
