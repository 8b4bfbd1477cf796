"""Calibrated surgery: the sequential pipeline from a plan and sample data to changed tensors. Imports torch.

Teacher (the source) and student (the result) walk side by side, one block of each in memory, their hidden states on the
same samples beside them. New layer j is made from a kept source layer; before it is left, its output projections are
refitted (`heal_block`) towards the teacher's hidden state at the input of the *next kept layer*, so a block learns to
say what the dropped ones behind it said, given what the student really has so far. Several candidates (sets of kept
layers, refits with and without the attention's projection) share the teacher's pass; guard samples choose among the
finished ones by the model's output.

Nothing exact is touched: a layer whose input is the teacher's and whose changes are exact is only passed through.
Changed tensors are written to a scratch folder, so memory holds one block of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from leansurgeon.checkpoints.publish.leftovers import scratch
from leansurgeon.checkpoints.skeleton import Skeleton
from leansurgeon.checkpoints.source import Source
from leansurgeon.checkpoints.stream import Stream
from leansurgeon.errors import UnsupportedModel, UsageError
from leansurgeon.measure.data.batches import inner
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.shape import Shape
from leansurgeon.surgery.plan import drop_layers
from leansurgeon.surgery.plan.planning import Plan, as_family
from leansurgeon.surgery.refit import heal_block
from leansurgeon.surgery.refit.block import check_finite, outputs_of
from leansurgeon.surgery.walk import choose_layers
from leansurgeon.surgery.walk.candidates import Candidate, candidates, ways
from leansurgeon.surgery.walk.make_layer import divides_heads, is_near
from leansurgeon.surgery.walk.student import PARTS, Edits, Student

if TYPE_CHECKING:
    from leansurgeon.surgery.walk.make_fused import Wide

Say = Callable[[str], None]
HALF = 0.6  # a result of at most this share of the layers also tries evenly spaced ones
CLOSE = 1.05  # a set of layers within this factor of the best one's trial score is tried on all of the data, too
TRIAL = {"fit": 12_288, "guard": 4_096}  # tokens on which sets of layers compete


@dataclass(frozen=True)
class Options:
    """How to calibrate. `criterion` chooses layers (`auto` tries several and takes the best after its refit), `keep`
    names them; `heal` refits; `fit` is the number of local fitting steps per layer.
    """

    criterion: str = "auto"
    keep: tuple[int, ...] | None = None
    heal: bool = True
    fit: int = 0
    device: str = "cpu"
    scratch: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """The kept layers, what chose them, the changed tensors, and the record of every decision (fit for JSON)."""

    layers: tuple[int, ...]
    criterion: str
    edits: Mapping[str, np.ndarray]
    record: dict[str, Any]
    held: ExitStack = field(default_factory=ExitStack, repr=False, compare=False)

    def close(self) -> None:
        """Let the changed tensors go."""
        self.held.close()


def calibrate(
    plan: Plan, source: Source, calibration: Calibration, options: Options | None = None, say: Say = lambda _: None
) -> Outcome:
    """Carry a plan through on sample data.

    Raises `UnsupportedModel` where the model cannot be run block by block, `Diverged` where activations are not finite,
    `UsageError` where the layers asked for do not fit the plan.
    """
    options = options or Options()
    started, held = time.monotonic(), ExitStack()
    with ExitStack() as undo, torch.no_grad():
        undo.enter_context(held)
        bench = Bench(plan, source, calibration, options, say)
        chosen, evidence = bench.choose()
        tried: list[dict[str, Any]] = []
        if len(chosen) > 1:
            say(f"Trying {len(chosen)} sets of layers ...")
            bench.look_at(TRIAL)
            winner, _ = bench.compete(chosen, held, tried)
            winner.edits.close()
            chosen = finalists(chosen, [t["judged_by"] for t in tried])
        bench.look_at(None)
        winner, score = bench.compete([*bench.ways(chosen[0]), *chosen[1:]], held, tried)
        undo.pop_all()
    record = {
        "calibration": calibration.as_dict(),
        "criterion": winner.candidate.criterion,
        "layers": list(winner.kept),
        "evidence": evidence,
        "candidates": tried,
        "healing": {"attention": winner.candidate.attention, "later": winner.candidate.later, **score},
        "decisions": winner.record,
        "changed_tensors": len(winner.edits),
        "seconds": round(time.monotonic() - started, 1),
    }
    return Outcome(winner.kept, winner.candidate.criterion, winner.edits, record, held)


def edits_folder(options: Options, held: ExitStack) -> Edits:
    return Edits(held.enter_context(scratch(options.scratch)))


class Bench:
    """What all candidates share: the source, the sample data, the two skeletons, the teacher's streams."""

    def __init__(self, plan: Plan, source: Source, calibration: Calibration, options: Options, say: Say) -> None:
        if source.weights is None:
            raise UnsupportedModel(f"{source.name} has no weights, so there is nothing to calibrate.")
        self.plan, self.source, self.calibration, self.options, self.say = plan, source, calibration, options, say
        self.teacher = Skeleton(source.config, source.architecture, options.device)
        self.teacher.fill_outer(source.weights.float32)
        arch = plan.architecture
        config = arch.with_shape(as_family(source, arch), plan.after, plan.layers)
        self.student = self._student(config, plan.layers)
        self.configs: dict[tuple[int, ...], Skeleton] = {plan.layers: self.student}
        self.look_at(TRIAL)
        self.names = {id(entry): name for name, entry in source.weights.entries.items()}
        self.streams: dict[str, Stream] = {}  # of the teacher
        # BERT's classes are causal where their config makes them decoders.
        self.causal = source.architecture.causal or bool(source.architecture.flat(source.config).get("is_decoder"))
        self.wide: Wide | None = None  # the skeleton of fused layers, once one is wanted
        self.current = -1  # the teacher's layer that is filled
        self.attention_gave: list[Tensor] = []  # what its attention gave on the samples to fit, where that is needed
        self.by_layer: dict[int, list[str]] = {}
        for spec in source.specs:
            self.by_layer.setdefault(spec.layer, []).append(spec.name)

    @property
    def heals(self) -> bool:
        """Whether there is anything to heal."""
        layers = range(self.plan.before.depth)
        changed = self.plan.before.depth != self.plan.after.depth or any(is_near(self.plan, i) for i in layers)
        return self.options.heal and changed

    def ways(self, best: Candidate) -> list[Candidate]:
        """The ways of healing to try. Behind a post-norm only layers that take over something are refitted."""
        if not self.heals or self.source.architecture.norm != "pre":
            return [best]
        found = ways(best)
        if all(is_near(self.plan, i) for i in best.kept):  # every layer is healed in any case
            found = [way for way in found if not way.later]
        return found

    def look_at(self, tokens: dict[str, int] | None) -> None:
        """Use so many tokens of the calibration, in whole batches (None: all of it)."""
        self.seen = "part" if tokens else "all"
        self.batches = {part: some(getattr(self.calibration, part), tokens and tokens[part]) for part in PARTS}
        self.masks = {part: [self.calibration.mask(b) for b in self.batches[part]] for part in PARTS}

    def compete(self, chosen: list[Candidate], held: ExitStack, tried: list) -> tuple[Student, dict[str, Any]]:
        """Carry out the candidates side by side; the best on the guard stays, the changes of the others are let go."""
        students = [Student(self, c, edits_folder(self.options, held)) for c in chosen]
        self.walk(students)
        scores = self.judge(students)
        tried += [asdict(s.candidate) | score | {"data": self.seen} for s, score in zip(students, scores, strict=True)]
        best = min(range(len(students)), key=lambda i: (scores[i]["judged_by"], i))
        for i, student in enumerate(students):
            if i != best:
                student.edits.close()
        return students[best], scores[best]

    def _student(self, config: dict, kept: tuple[int, ...]) -> Skeleton:
        skeleton = Skeleton(config, self.plan.architecture, self.options.device)
        skeleton.share_outer(self.teacher)
        return skeleton

    def student_of(self, kept: tuple[int, ...]) -> Skeleton:
        """A skeleton of the result. One serves all candidates, unless the config lists something for every layer."""
        arch = self.plan.architecture
        if not arch.per_layer:
            return self.student
        if kept not in self.configs:
            config = arch.with_shape(as_family(self.source, arch), self.plan.after, kept)
            self.configs[kept] = self._student(config, kept)
        return self.configs[kept]

    def fill(self, layer: int) -> None:
        """A block of the teacher, from the source."""
        self.teacher.fill(layer, {name: self.source.weights.float32(name) for name in self.by_layer[layer]})

    def choose(self) -> tuple[list[Candidate], dict[str, Any]]:
        before, after = self.plan.before, self.plan.after
        if before.depth == after.depth:
            return [Candidate(tuple(range(before.depth)), "all layers stay")], {}
        if self.options.keep is not None:
            check_kept(self.options.keep, before, after)
            return [Candidate(self.options.keep, "as listed")], {}
        self.say("Choosing layers ...")
        return self.measured()

    def measured(self) -> tuple[list[Candidate], dict[str, Any]]:
        """Candidates by the criterion, and the numbers behind them."""
        plan, criterion, period = self.plan, self.options.criterion, self.source.architecture.period
        batches, masks = self.batches["guard"], self.masks["guard"]
        evidence: dict[str, Any] = {}
        if criterion == "fuse":
            from leansurgeon.surgery.walk import make_fused

            return make_fused.candidates(self)
        if criterion in ("greedy", "leave-one-out"):
            kept, rounds = choose_layers.by_output(
                self.teacher, self.fill, batches[:4], masks[:4], plan.before, plan.after, period,
                greedy=criterion == "greedy", say=self.say,
            )  # fmt: skip
            drop_layers.refuse_misplaced(self.source, plan.init, kept)
            return [Candidate(kept, criterion)], {"rounds": rounds}
        found = choose_layers.measure(self.teacher, self.fill, batches, masks, plan.before, plan.after)
        evidence |= found.as_dict()
        kept = {
            "angular": choose_layers.by_angle(found, period),
            "angular, second": choose_layers.by_angle(found, period, rank=1),
            "angular, two blocks": choose_layers.by_angle(found, period, blocks=2),
            "influence": choose_layers.by_influence(found, period),
        }
        if criterion != "auto" or plan.after.depth <= HALF * plan.before.depth:  # far from it, spacing is the worst
            kept["even"] = drop_layers.evenly_per_stage(plan.before, plan.after, period)
            kept["last-of-each"] = drop_layers.evenly_per_stage(plan.before, plan.after, period, last=True)
        found_sets = [c for c in candidates(criterion, kept) if not drop_layers.misplaced(self.source, c.kept)]
        if not found_sets:
            raise UsageError(f"Layers cannot be chosen by '{criterion}' here.", "Use --method auto.")
        return found_sets, evidence

    # -- the walk --------------------------------------------------------------------------------

    def walk(self, students: list[Student]) -> None:
        """Teacher and students from the first layer to the last."""
        self.streams = streams = {part: Stream(self.teacher, self.batches[part]) for part in PARTS}
        for layer in range(self.teacher.depth):
            self.fill(layer)
            self.current = layer
            due = [s for s in students if s.until == layer]
            outputs = self.teach(layer, due)
            for part in PARTS:
                check_finite(outputs[part], f"behind layer {layer}")
            if due:
                names = ", ".join(dict.fromkeys(str(s.at) for s in due))
                self.say(f"  source layer {layer}: {len(due)} of {len(students)} candidates at new layer {names}")
            for student in due:
                student.take(layer, outputs)
            self.teacher.empty(layer)
            for part, stream in streams.items():
                stream.advance(outputs[part])

    def teach(self, layer: int, due: list[Student]) -> dict[str, list[Tensor]]:
        """What the teacher's block gives. Where a student's heads will be fitted to what its attention alone gives on
        the samples to fit, that is noted, too.
        """
        with ExitStack() as noted:
            self.attention_gave = []
            if divides_heads(self.plan, layer) and any(s.kept[s.at] == layer for s in due):
                self.attention_gave = noted.enter_context(outputs_of(self.teacher.projections(layer)[0]))
            fit = self.streams["fit"].run()
        return {"fit": fit, "guard": self.streams["guard"].run()}

    def judge(self, students: list[Student]) -> list[dict[str, Any]]:
        """How far every student's output is from the teacher's on the guard samples, and its loss where there are
        labels: divergence of the predictions (nats a token) where the model predicts the classes of the labels, else
        relative error (of hidden states, of a regression).
        """
        tallies = [Tally() for _ in students]
        teacher, config = self.streams["guard"], self.source.architecture.flat(self.source.config)
        regression = config.get("problem_type") == "regression"
        for b, batch in enumerate(self.batches["guard"]):
            mask = self.masks["guard"][b]
            target = output(teacher, b)
            for student, tally in zip(students, tallies, strict=True):
                logits = output(student.streams["guard"], b)
                labelled = teacher.predicts and not regression and classes_of(logits, batch)
                score = self.calibration.score(logits, batch) if labelled else None
                tally.add(logits, target, mask, score)
        return [tally.as_dict() for tally in tallies]


def some(batches: list[dict], tokens: int | None) -> list[dict]:
    """Batches at equal spacing (sentences lie by length) that hold about so many tokens; an image counts as 64."""
    sizes = [b["input_ids"].numel() if "input_ids" in b else 64 * len(next(iter(b.values()))) for b in batches]
    if tokens is None or tokens >= sum(sizes):
        return list(batches)
    return [batches[i] for i in inner(len(batches), max(1, round(len(batches) * tokens / sum(sizes))))]


def output(stream: Stream, b: int) -> Tensor:
    """What the model says for one batch; logits of all batches at once would not fit in memory."""
    return stream.head(b, stream.hidden[b])


def classes_of(logits: Tensor, batch: dict) -> bool:
    """Whether the labels of a batch can be classes of these outputs, one label for every vector."""
    labels = batch.get("labels")
    if labels is None or logits.shape[-1] < 2 or logits.dim() != labels.dim() + 1:
        return False
    return not labels.is_floating_point() and int(labels.max()) < logits.shape[-1]


@dataclass
class Tally:
    """Sums over guard samples for one candidate."""

    divergence: float = 0.0
    error: float = 0.0
    rows: int = 0
    loss: float = 0.0
    scored: float = 0.0
    predicts: bool = True  # every batch has had a score

    def add(self, logits: Tensor, target: Tensor, mask: Tensor | None, score: tuple[float, float] | None) -> None:
        """One batch; `score` is loss sum and count, None where the outputs are no predictions of its labels."""
        self.predicts &= score is not None
        a, b = (heal_block.flat(x, mask) for x in (logits, target))
        rows = max(1, 2**22 // a.shape[-1])
        for x, y in zip(a.split(rows), b.split(rows), strict=True):
            if self.predicts:
                p, q = torch.log_softmax(y.double(), -1), torch.log_softmax(x.double(), -1)
                self.divergence += float((p.exp() * (p - q)).sum())
            self.error += float(choose_layers.relative_error(y, x).sum())
        self.rows += len(a)
        if score:
            self.loss, self.scored = self.loss + score[0], self.scored + score[1]

    def as_dict(self) -> dict[str, Any]:
        found = {"guard_error": self.error / self.rows}
        if self.predicts:
            found["guard_divergence"] = self.divergence / self.rows
        if self.scored:
            found["guard_loss"] = self.loss / self.scored
        key = "guard_divergence" if self.predicts else "guard_error"
        return {k: round(v, 6) for k, v in found.items()} | {"judged_by": round(found[key], 6)}


def finalists(chosen: list[Candidate], scores: list[float]) -> list[Candidate]:
    """The best, and one more that a trial on part of the data cannot tell from it."""
    order = sorted(range(len(chosen)), key=lambda i: (scores[i], i))[:2]
    return [chosen[i] for i in order if scores[i] <= scores[order[0]] * CLOSE]


def check_kept(kept: tuple[int, ...], before: Shape, after: Shape) -> None:
    """Raises `UsageError` where a list of layers does not give the planned shape."""
    counts = [sum(i in kept for i in stage) for stage in choose_layers.ranges(before)]
    wanted = [stage.depth for stage in after.stages]
    if counts != wanted or len(kept) != sum(wanted) or list(kept) != sorted(set(kept)):
        raise UsageError(f"The layers {list(kept)} give {counts} a stage, and the plan wants {wanted}.")
