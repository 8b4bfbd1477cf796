"""State shared by all candidates of a calibrated surgery, and the bounds on its work. Imports torch.

The state is the plan, the source (read only), the skeletons that its blocks are filled into, and the sample data.

Bounds are counted in forward passes of the source over the fit and guard samples; costs in block-tokens: one token
through one block, times three where gradients are computed. A part that would exceed a bound is skipped before it
starts: sets of layers, ways of healing, steps of the local fit. One set is always refitted on all data, since there is
no result without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

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
from leansurgeon.surgery.candidates import Candidate, course, divides_heads, is_near, last_made, stages_of
from leansurgeon.surgery.local_fit import products
from leansurgeon.surgery.next_steps import LayerPattern, pattern_of
from leansurgeon.surgery.planning import Plan
from leansurgeon.surgery.probes import flat, relative_error
from leansurgeon.surgery.resume import Edits, ResumeState, Step

PARTS = ("fit", "guard")
CHOICE, ALL = 3.0, 10.0  # passes allowed for choice and closed-form refit, and for everything with the local fit
LEAST = 16_384  # tokens; smaller data sets get the bounds of this many
TRIAL = {"fit": 8_192, "guard": 2_048}  # tokens on which sets of layers compete
SMALLER = (0.5, 0.25)  # shares of the trial data to fall back to when all sets on all of it would exceed the bound
STREAMS, SHARE = 16, 0.3  # hidden states stay on the GPU if this many copies take less than this share of its memory
TRAINED = 5  # copies of a block's weights while it is fitted: values, gradients, two of Adam, and a backup
FITTED = 8 * 2**30  # bytes for fitting blocks at once; more only if the weights take more
JUDGED = 32  # minimum number of images to judge sets of layers on: a classifier has one output per image
AGREES = 0.03  # highest relative error of the source's last hidden states at which bf16 products are used


@dataclass(frozen=True)
class SampleView:
    """The sample data in use: batches and their masks by part, and whether that is all of it."""

    seen: str  # "part" or "all"
    batches: Mapping[str, list[Batch]]
    masks: Mapping[str, list[Tensor | None]]
    answers: Mapping[str, list[Tensor | None]]  # of the decoder's input in an encoder-decoder; else as `masks`

    @classmethod
    def of(cls, calibration: Calibration, tokens: Mapping[str, int] | None) -> SampleView:
        """Take whole batches with this many tokens per part (None: all), and at least `JUDGED` images of the guard."""
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
        """Return the masks of hidden states in a stage."""
        return self.answers[part] if stage else self.masks[part]

    def streams(self, skeleton: Skeleton) -> dict[str, Stream]:
        """Return new streams of all parts, placed before the first block of a skeleton."""
        return {part: Stream(skeleton, batches) for part, batches in self.batches.items()}


@dataclass(frozen=True)
class TeacherOutputs:
    """What the teacher computes at one layer, whose block is filled: its streams before the layer, the block's output
    by part, and on request the output of its attention alone on the fit samples.
    """

    layer: int
    streams: Mapping[str, Stream]
    outputs: Mapping[str, list[Tensor]]
    attention: list[Tensor]


class CalibrationContext:
    """The plan, the source as the teacher, and skeletons of the result. Raises `UnsupportedModel` if the source cannot
    be run block by block.
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
        """Finished steps are saved in `state`; changed tensors stay on disk until `held` closes."""
        self.plan, self.method, self.source, self.target = plan, plan.method, plan.source, plan.target
        self.calibration, self.state, self.say = calibration, state or ResumeState(), say
        self.samples = {part: getattr(calibration, part) for part in PARTS}
        self.held = held or ExitStack()
        self.tried: list[Tried] = []  # scored candidates
        self.skeletons: list[Skeleton] = []  # all skeletons, to add up their work
        self.earlier = 0.0  # block-tokens that an interrupted cut spent up to the last step taken over
        self.taken = 0  # number of steps taken over
        self.held_back: list[str] = []  # what the bounds on passes skipped
        self.cast: Callable[[], AbstractContextManager] = nullcontext  # precision of products in all skeletons
        self.device = torch.device(device)
        self.teacher = self.skeleton_of(self.source.config, self.source.architecture)
        self.teacher.fill_outer(self.source.weights.float32)
        self.results: dict[tuple[int, ...], Skeleton] = {}
        self.lent: tuple[Skeleton, int, int] | None = None  # a filled block of a result, and its source layer
        self.result(plan.layers)
        # BERT's classes are causal if their config makes them decoders.
        arch = self.source.architecture
        self.causal = arch.causal or bool(self.source.flat_config.get("is_decoder"))
        self.by_layer: dict[int | None, list[TensorSpec]] = {}
        for spec in self.source.specs:
            self.by_layer.setdefault(spec.layer, []).append(spec)

    def skeleton_of(self, config: Config, architecture: Architecture) -> Skeleton:
        """Return an empty model on the device. Its hidden states are stored on `home`."""
        if not self.source.has_head:
            used = body_class(architecture, class_name(self.source.used_config))
            config = config | {"architectures": [used]}
        skeleton = Skeleton(config, architecture, self.device)
        skeleton.home, skeleton.cast = self.home, lambda: self.cast()
        self.skeletons.append(skeleton)
        return skeleton

    def new_edits(self) -> Edits:
        """Return an empty store of changed tensors, with a folder of its own."""
        return Edits(self.held.enter_context(scratch()))

    @cached_property
    def home(self) -> torch.device:
        """The device, or host memory if `STREAMS` copies of all hidden states would fill too much of the GPU."""
        if self.device.type != "cuda":
            return self.device
        width = max(stage.width for stage in self.plan.before.stages)
        size = 4 * width * sum(tokens_of(batch) for batches in self.samples.values() for batch in batches)
        room = torch.cuda.get_device_properties(self.device).total_memory
        return self.device if STREAMS * size < SHARE * room else torch.device("cpu")

    @cached_property
    def longest_span(self) -> int:
        """Maximum number of blocks trained together. It depends on the model alone, so every machine gives the same
        result: training takes at most as much memory as the weights in their file, or `FITTED` if that is more.
        """
        block = max(sum(p.numel() for p in self.teacher.block(i).parameters()) for i in range(self.teacher.depth))
        entries = (self.source.weights.entries[spec.name] for spec in self.source.specs)
        return max(FITTED, sum(entry.end - entry.start for entry in entries)) // (4 * TRAINED * block)

    def choose_products(self) -> None:
        """Use bf16 products from now on if the device has them and the guard agrees: on a GPU for every cut, on a CPU
        only if layers are dropped, which costs a hundred times the rounding error.
        """
        if self.device.type != "cuda" and self.plan.before.depth == self.plan.after.depth:
            return
        cast = products(max(stage.width for stage in self.plan.before.stages), self.device.type)
        if cast is nullcontext:
            return
        # The relative error of the source's last hidden states on the first guard batch.
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
        errors = relative_error(*(flat(stream.hidden[0], mask) for stream in (plain, rounded)))
        if float(errors.mean()) < AGREES:
            self.cast = cast

    @property
    def is_exact(self) -> bool:
        """Whether to sum in float64: on a CPU, where it is no slower, unless hidden states are rounded."""
        return self.cast is nullcontext and self.device.type == "cpu"

    @property
    def heals(self) -> bool:
        """Whether there is anything to heal."""
        layers = range(self.plan.before.depth)
        changed = self.plan.before.depth != self.plan.after.depth or any(is_near(self.plan, i) for i in layers)
        return self.method.refits and changed

    @property
    def work(self) -> float:
        """Block-tokens spent so far, without embeddings and heads; a training step counts three times."""
        return self.earlier + sum(skeleton.work for skeleton in self.skeletons)

    @cached_property
    def one_pass(self) -> float:
        """Block-tokens of one forward pass of the source over the fit and guard samples."""
        return self.plan.before.depth * sum(map(self.tokens, self.samples.values()))

    def passes(self) -> float:
        """Return the work so far, in forward passes of the source over the fit and guard samples."""
        return self.work / self.one_pass

    @property
    def most(self) -> float:
        """Bound on the block-tokens of the whole cut."""
        return self.work_allowed(ALL)

    @property
    def most_closed(self) -> float:
        """Bound on the block-tokens of choice and closed-form refit. Making the layers that the plan changes in any
        case (fewer heads, fewer units) is added once on top.
        """
        return min(self.most, self.anew + self.work_allowed(CHOICE))

    def work_allowed(self, passes: float) -> float:
        """Return the block-tokens of this many passes, over at least `LEAST` tokens."""
        return passes * max(self.one_pass, self.plan.before.depth * LEAST)

    @cached_property
    def anew(self) -> float:
        """Block-tokens of making every layer once; 0 if the plan changes none of them in any case."""
        if not any(is_near(self.plan, i) for i in self.plan.layers):
            return 0.0
        return self.cost(Candidate(self.plan.layers, ""), self.samples)

    def cost(self, way: Candidate, batches: Mapping[str, list[Batch]], share: float = 1.0) -> float:
        """Return the block-tokens of a candidate on these samples, without the teacher's own.

        Behind the last layer that it changes, only a `share` of the guard samples continues.
        """
        fit, guard, first = (self.tokens(some) for some in (batches["fit"], batches["guard"], batches["guard"][:1]))
        heals, pre_norm, looks = self.heals, self.source.architecture.norm == "pre", 2 * first
        # How far a projection reaches (or which norm closes the block) is found on one batch; the sums take all.
        refit = looks * (1 if pre_norm else 2) + fit + 2 * guard
        layers = course(way.kept, self.plan)
        last = last_made(layers, later=way.later)
        total, begun, gone = 0.0, False, False
        for j, new in enumerate(layers):
            begun, gone = begun or new.changed, gone or new.cut
            refits = heals and (new.cut or (pre_norm and (new.near or (gone and way.later))))
            goes_on = fit if j < last else 0.0
            if begun and not (new.changed or refits):
                total += goes_on + (guard if j < last else share * guard)
            elif begun:
                projections = 1 + self.attentions if way.attention and new.changed else 1
                total += goes_on + (projections * refit if refits else guard)
                (before, after), trim = stages_of(self.plan, new.kept), looks + fit + guard
                heads = fit if divides_heads(self.plan, new.kept) else trim if after.heads < before.heads else 0.0
                total += heads + (trim if after.mlp_dim < before.mlp_dim else 0.0)
        return total

    @cached_property
    def pattern(self) -> LayerPattern | None:
        """The pattern by which an external format reads the source's layers, if there is one."""
        return pattern_of(self.source.architecture, self.source.config)

    def breaks_pattern(self, kept: Sequence[int]) -> bool:
        """Return whether that format would misread these layers."""
        return self.pattern is not None and not self.pattern.holds(kept)

    @cached_property
    def attentions(self) -> int:
        """Number of attentions in one layer."""
        return max(len(self.teacher.projections(layer)) for layer in range(self.teacher.depth))

    def tokens(self, batches: list[Batch]) -> float:
        """Return the number of tokens in some batches as blocks count them, on average over all layers."""
        if "decoder_input_ids" in batches[0]:
            encoder, decoder = (sum(b[key].numel() for b in batches) for key in ("input_ids", "decoder_input_ids"))
            first = self.plan.before.stages[0].depth
            return (first * encoder + (self.plan.before.depth - first) * decoder) / self.plan.before.depth
        return sum(b["input_ids"].numel() if "input_ids" in b else self.patches * rows_of(b) for b in batches)

    @cached_property
    def patches(self) -> float:
        """Tokens per image on average over all layers: later stages of a pyramid have fewer."""
        batch = some_rows(self.calibration.guard[0], slice(1))
        stream, tokens = Stream(self.teacher, [batch]), 0.0
        for _ in range(self.teacher.depth):
            tokens += stream.hidden[0].numel() / stream.hidden[0].shape[-1]
            stream.advance(stream.hidden)
        return tokens / self.teacher.depth

    def go_on_from(self, step: Step) -> None:
        """Take over a step of an interrupted cut. Its work counts, so bounds are those of an uninterrupted one."""
        self.earlier += step.work - self.work
        self.taken += 1

    def keep(self, name: str, tensors: Mapping[str, np.ndarray], record: JsonObject) -> None:
        """Save a finished step."""
        self.state.put(name, Step(tensors, record, self.work))

    def spec(self, layer: int, role: str) -> TensorSpec:
        """Return the first source tensor of a role in a layer."""
        return next(s for s in self.by_layer[layer] if s.role == role)

    def fill(self, layer: int, skeleton: Skeleton | None = None) -> None:
        """Load a block of the source into the teacher or another skeleton of the source."""
        tensors = {spec.name: self.source.weights.float32(spec.name) for spec in self.by_layer[layer]}
        (skeleton or self.teacher).fill(layer, tensors)

    def beside(self, config: Config, architecture: Architecture) -> Skeleton:
        """Return a skeleton that shares everything outside the blocks with the teacher."""
        skeleton = self.skeleton_of(config, architecture)
        skeleton.share_outer(self.teacher)
        return skeleton

    def result(self, kept: tuple[int, ...]) -> Skeleton:
        """Return a skeleton of the result. One serves all candidates, unless the config lists values per layer."""
        key = kept if self.target.architecture.per_layer else ()
        if key not in self.results:
            self.results[key] = self.beside(self.target.config(kept), self.target.architecture)
        return self.results[key]

    def lend(self, skeleton: Skeleton, at: int, layer: int, tensors: Callable[[], Arrays]) -> None:
        """Fill a block of a result with source layer `layer` unchanged, unless it is filled so already: behind their
        cuts all candidates need the same block. It stays filled until `give_back`.
        """
        alike = replace(stages_of(self.plan, layer)[0], depth=0) == replace(stages_of(self.plan, layer)[1], depth=0)
        if self.lent != (skeleton, at, layer) or not alike:
            self.give_back()
            skeleton.fill(at, tensors())
            self.lent = skeleton, at, layer

    def give_back(self) -> None:
        """Empty the block filled by `lend`."""
        if self.lent is not None:
            self.lent[0].empty(self.lent[1])
            self.lent = None

    @cached_property
    def workshop(self) -> Skeleton:
        """A second skeleton of the source, for filling blocks that are to be changed."""
        return self.beside(self.source.config, self.source.architecture)
