"""Calibrated surgery: from a plan and sample data to changed tensors, layer by layer. Imports torch.

Teacher (the source) and student (the result) run side by side, with one block of each in memory plus their hidden
states on the same samples. New layer j starts from a kept source layer. Before moving on, its output projections are
refitted (`refit_block`) to the teacher's hidden state at the input of the *next kept layer*, given the student's actual
inputs. A block so learns to add what the dropped blocks behind it added. Several candidates (sets of kept layers,
refits with and without the attention's projection) share the teacher's pass; guard samples choose among the finished
ones by the model's output.

Exact changes stay exact: a layer whose input equals the teacher's and whose changes are exact is only passed through.
Changed tensors are written to a scratch folder, so memory holds one block of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
import torch

from leansurgeon.checkpoints.blockwise.stream import Stream
from leansurgeon.checkpoints.recorded.decided import Decisions, GuardScore, Healing, Tried
from leansurgeon.checkpoints.recorded.part import plain
from leansurgeon.errors import UsageError
from leansurgeon.measure.costs.precision import full_fp32
from leansurgeon.measure.data.batches import tokens_of
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.progress import Say, silent, track
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.shape import SPACINGS, Groups, evenly_per_stage, groups_of
from leansurgeon.surgery import choose_layers, drop_layers
from leansurgeon.surgery.candidate_model import CandidateModel
from leansurgeon.surgery.candidates import Candidate, divides_heads, is_near, marks
from leansurgeon.surgery.context import PARTS, SMALLER, TRIAL, CalibrationContext, SampleView, TeacherOutputs
from leansurgeon.surgery.local_fit import STEP_TOKENS
from leansurgeon.surgery.planning import Plan
from leansurgeon.surgery.probes import check_finite, outputs_of
from leansurgeon.surgery.resume import ResumeState
from leansurgeon.surgery.score import CLOSE, judge, race
from leansurgeon.surgery.spans import PASSES, block_steps, fit_locally

HALF = 0.6  # at most this share of the layers left: evenly spaced ones are tried, too
CHOICE, RESULT = "choice", "result"  # names of saved steps
# For the forecast of the work.
MORE_SETS = 3  # sets of layers besides the contiguous blocks
WAYS = 3  # candidates on all data: two ways of healing and another finalist
RACED = 0.5  # share of the trial's guard that a set of layers sees before it can be eliminated
SOLVED = 1.5  # factor over the forward passes alone: sums and solutions of refits, transfers of weights


@dataclass(frozen=True)
class CalibrationResult:
    """The changed tensors, and the record of every decision."""

    edits: Mapping[str, np.ndarray]
    record: Decisions
    held: ExitStack = field(default_factory=ExitStack, repr=False, compare=False)

    def close(self) -> None:
        """Delete the changed tensors."""
        self.held.close()


def calibrate(
    plan: Plan, calibration: Calibration, say: Say = silent, device: str = "cpu", state: ResumeState | None = None
) -> CalibrationResult:
    """Carry out a plan on sample data, on `device`. Finished steps are saved in `state` or taken from it.

    Raises `UnsupportedModel` if the model cannot be run block by block, `Diverged` if activations are not finite,
    `UsageError` if the requested layers do not fit the plan.
    """
    if state and (step := state.get(RESULT)):
        record = Decisions.from_dict(step.record)
        record = replace(record, steps_taken_over=record.steps_taken_over + 1)
        return CalibrationResult(step.tensors, record)
    started = time.monotonic()
    with full_fp32(), torch.no_grad(), ExitStack() as undo:  # full fp32 wherever bf16 is not requested
        context = CalibrationContext(plan, calibration, say, device, state, undo)
        context.choose_products()
        say(forecast_cost(context).describe(context.source.name))
        chosen, evidence = contest(context)
        whole, (best, *others) = SampleView.of(calibration, None), chosen
        ways = [best]
        # In a post-norm model only layers that replace dropped ones are refitted.
        if context.heals and context.source.architecture.norm == "pre":
            attention = replace(best, attention=True)
            ways.append(attention)
            # Refitting later layers costs most, so it is tried only together with the attention at the cuts, which each
            # block's guard samples accept or reject. A local fit achieves the same and more. Where the plan changes all
            # layers, all are healed anyway.
            grows = context.method.grows and best.kept != tuple(range(plan.before.depth))
            if not (grows or all(is_near(plan, i) for i in best.kept)):
                ways.append(replace(attention, later=True))
        winner, score, teacher = compete(context, whole, [*ways, *others], "refitting layers")
        local = None
        if winner.marks:
            spent = context.passes()
            local, score = fit_locally(context, whole, winner, teacher, score)
            local = replace(local, passes=round(context.passes() - spent, 2))
        held = undo.pop_all()
    record = Decisions(
        calibration=calibration.as_record(),
        criterion=winner.candidate.criterion,
        layers=winner.kept,
        evidence=evidence,
        candidates=tuple(context.tried),
        healing=Healing(winner.candidate.attention, winner.candidate.later, score, local),
        decisions=tuple(winner.record),
        changed_tensors=len(winner.edits),
        passes=round(context.passes(), 2),
        tokens=round(context.one_pass / plan.before.depth),
        held_back=tuple(context.held_back),
        steps_taken_over=context.taken,
        seconds=round(time.monotonic() - started, 1),
    )
    with suppress(OSError):  # the result matters more if the disk is full; the other steps remain saved
        context.keep(RESULT, winner.edits, record.as_dict())
        context.state.keep_only(RESULT)
    return CalibrationResult(winner.edits, record, held)


def contest(context: CalibrationContext) -> tuple[list[Candidate], JsonObject]:
    """Return the candidates left after a trial on part of the data, and the numbers behind them."""
    if step := context.state.get(CHOICE):
        context.go_on_from(step)
        said = step.record
        context.held_back += said["held_back"]
        context.tried += map(Tried.from_dict, said["tried"])
        return [*map(Candidate.from_dict, said["chosen"])], said["evidence"]
    part = SampleView.of(context.calibration, TRIAL)
    chosen, evidence = choose(context, part)
    part, chosen = affordable(context, part, chosen)
    if len(chosen) > 1:
        students, teacher = run_candidates(context, part, chosen, f"trying {len(chosen)} sets of layers")
        room = after_trial(context, chosen)
        chosen = finalists(race(context, part, students, teacher, room), context.breaks_pattern)
        scores = {one.kept: one.score.judged_by for one in context.tried if one.criterion.startswith("block")}
        losing = [a.depth > b.depth for a, b in zip(context.plan.before.stages, context.plan.after.stages, strict=True)]
        if sum(losing) > 1 and scores:  # the best block of each stage, if together they have not been tried yet
            kept = choose_layers.combine_stages(context.plan.before.spans, scores)
            known = any(one.kept == kept for one in context.tried)
            if not (known or drop_layers.explain_misplaced(context.source, kept)):
                chosen.append(Candidate(kept, "block of every stage"))
    contested = {"chosen": plain(chosen), "evidence": evidence, "tried": plain(context.tried)}
    context.keep(CHOICE, {}, contested | {"held_back": context.held_back})
    return chosen, evidence


def after_trial(context: CalibrationContext, chosen: Sequence[Candidate]) -> float:
    """Return the block-tokens that the trial may use so that any one of the sets can still be refitted on all data."""
    return context.most_closed - context.one_pass - max(context.cost(way, context.samples) for way in chosen)


def affordable(
    context: CalibrationContext, part: SampleView, chosen: list[Candidate]
) -> tuple[SampleView, list[Candidate]]:
    """Return the part of the data on which sets of layers compete, and the sets that compete. If all of them would
    exceed the bound on passes, use first less data, then fewer sets, in the order of the list (angles and influence
    first).
    """
    if len(chosen) < 2:
        return part, chosen
    room = after_trial(context, chosen) - context.work
    sizes = {name: sum(map(tokens_of, context.samples[name])) for name in PARTS}
    for share in (None, *SMALLER):
        if share:
            part = SampleView.of(context.calibration, {name: share * min(TRIAL[name], sizes[name]) for name in PARTS})
        passed = context.teacher.depth * sum(context.tokens(part.batches[name]) for name in PARTS)
        costs = [context.cost(way, part.batches, 1 / len(part.batches["guard"])) for way in chosen]
        if passed + sum(costs) <= room:
            break
    begun = [chosen[i] for i in fitting(costs, room - passed)]
    if share:
        context.held_back.append(f"sets of layers competed on {share:.0%} of the usual part of the data")
    if left_out := len(chosen) - len(begun):
        context.held_back.append(f"{left_out} of {len(chosen)} sets of layers were not tried")
    return part, begun


# -- which layers ----------------------------------------------------------------------------------


def choose(context: CalibrationContext, view: SampleView) -> tuple[list[Candidate], JsonObject]:
    """Return the candidates, and the numbers behind them."""
    before, after = context.plan.before, context.plan.after
    if before.depth == after.depth:
        return [Candidate(tuple(range(before.depth)), "all layers stay")], {}
    period = context.source.architecture.period
    chosen, evidence = [Candidate(context.method.kept or (), "as listed")], {}
    if context.method.keep is None:
        chosen, evidence = list_candidates(context, view, groups_of(before, after, period))
    for candidate in chosen:
        drop_layers.check_kept(candidate.kept, before, after, period)
    return chosen, evidence


def list_candidates(
    context: CalibrationContext, view: SampleView, stages: list[Groups]
) -> tuple[list[Candidate], JsonObject]:
    """Return the candidates of the criterion, and the numbers behind them."""
    before, after, criterion = context.plan.before, context.plan.after, context.method.layers
    batches, masks, answers = (part["guard"] for part in (view.batches, view.masks, view.answers))
    evidence = choose_layers.measure_layers(context.teacher, context.fill, batches, masks, stages, answers)
    sets = {
        "angular": choose_layers.by_angle(evidence),
        "angular, second": choose_layers.by_angle(evidence, rank=1),
        "angular, two blocks": choose_layers.by_angle(evidence, blocks=2),
        "influence": choose_layers.by_influence(evidence),
    }
    if criterion != "auto" or after.depth <= HALF * before.depth:  # with more layers left, spacing does worst
        sets |= {name: evenly_per_stage(before, after, stages[0].period, name) for name in SPACINGS}
    if criterion == "auto":
        sets |= choose_layers.blocks(evidence)
        if context.pattern and (near := sets["angular"] or evenly_per_stage(before, after)):
            sets["pattern"] = context.pattern.near(near, before.depth)
    else:
        sets = {criterion: sets[criterion]}
    kinds, by_layers = drop_layers.kinds_of(context.source), {}
    for name, listed in sets.items():  # each distinct set once, with one layer of every kind where possible
        if listed:
            kept = drop_layers.with_every_kind(kinds, listed)
            named = name if kept == listed else name + drop_layers.OF_EVERY_KIND
            by_layers.setdefault(kept, Candidate(kept, named))
    every = [
        candidate
        for kept, candidate in by_layers.items()
        if not (candidate.criterion.startswith("pattern") and context.breaks_pattern(kept))
        and not drop_layers.explain_misplaced(context.source, kept)
    ]
    if not every:
        raise UsageError(f"Layers cannot be chosen by '{criterion}' here.", "Use --method auto.")
    return every, evidence.as_dict()


def finalists(left: list[tuple[CandidateModel, float]], breaks: Callable[[Sequence[int]], bool]) -> list[Candidate]:
    """Return the best of those that a trial left, and one more whose score on part of the data is within `CLOSE` of it.
    Among several, prefer one that does not break the layer pattern of other formats.
    """
    (best, least), *others = sorted(left, key=lambda pair: pair[1])
    close = [student.candidate for student, score in others if score <= least * CLOSE]
    return [best.candidate, *sorted(close, key=lambda one: breaks(one.kept))[:1]]


def fitting(costs: Sequence[float], room: float) -> list[int]:
    """Which pieces are begun, in their order: the first in any case, others as far as there is room for all of them.

    >>> fitting([3, 4, 9, 1], 8.5)
    [0, 1, 3]
    """
    begun, spent = [], 0.0
    for i, each in enumerate(costs):
        if not i or spent + each <= room:
            begun, spent = [*begun, i], spent + each
    return begun


# -- carrying out candidates -----------------------------------------------------------------------


def compete(
    context: CalibrationContext, view: SampleView, chosen: list[Candidate], title: str
) -> tuple[CandidateModel, GuardScore, Stream]:
    """Carry out the candidates side by side, as many as the bound on passes allows. Return the best on the guard with
    its score and the teacher's guard stream behind the last block; the tensors of the others are deleted.
    """
    room = context.most_closed - context.work - context.one_pass
    begun = [chosen[i] for i in fitting([context.cost(way, view.batches) for way in chosen], room)]
    if left_out := len(chosen) - len(begun):
        context.held_back.append(
            f"{left_out} of {len(chosen)} sets and ways of healing were not carried out on all data"
        )
    students, teacher = run_candidates(context, view, begun, title)
    scores = judge(context, view, teacher, [s.streams["guard"] for s in students])
    context.tried += [s.candidate.as_tried(score, view.seen) for s, score in zip(students, scores, strict=True)]
    costs = [(context.breaks_pattern(student.kept), len(student.marks)) for student in students]
    best = best_of([score.judged_by for score in scores], costs)
    for i, student in enumerate(students):
        if i != best:
            student.edits.close()
    return students[best], scores[best], teacher


def best_of(scores: Sequence[float], costs: Sequence[tuple[bool, int]]) -> int:
    """Return the index of the best candidate: the lowest score. Among those within `CLOSE` of it, prefer one that keeps
    the layer pattern other formats rely on, then, if a local fit follows, the one with the fewest spans. MiniLM at 4 of
    6 layers ends at a cosine of 0.9361 with one cut after 5.5 passes, and at 0.9366 with two (0.4 % better before the
    fit) after 9.6.
    """
    close = [i for i, score in enumerate(scores) if score <= CLOSE * min(scores)]
    return min(close, key=lambda i: (costs[i], scores[i], i))


def run_candidates(
    context: CalibrationContext, view: SampleView, chosen: Sequence[Candidate], title: str
) -> tuple[list[CandidateModel], Stream]:
    """Run the teacher and one student per candidate from the first layer to the last: after each source layer, the
    teacher's states, then the new layers that stand for it. Return the students, and the teacher's guard stream behind
    the last layer.
    """
    students = [CandidateModel(context, view, candidate, i) for i, candidate in enumerate(chosen)]
    teacher = context.teacher
    streams = view.streams(teacher)
    for layer in track(range(teacher.depth), title, "layers/s"):
        context.fill(layer)
        due = [s for s in students if s.until == layer]
        attention = []
        with ExitStack() as noted:
            # Heads to be split are fitted to the output of the attention alone on the fit samples.
            if divides_heads(context.plan, layer) and any(s.kept[s.at] == layer for s in due):
                attention = noted.enter_context(outputs_of(teacher.projections(layer)[0]))
            fit = streams["fit"].run()
        outputs = TeacherOutputs(layer, streams, {"fit": fit, "guard": streams["guard"].run()}, attention)
        for part in PARTS:
            check_finite(outputs.outputs[part], f"behind layer {layer}")
        for student in sorted(due, key=lambda s: s.makes):  # first those that pass through: they share one block
            if student.makes:
                context.give_back()
            student.take(outputs)
        context.give_back()
        teacher.empty(layer)
        for part, stream in streams.items():
            stream.advance(outputs.outputs[part])
    return students, streams["guard"]


# -- forecast: its bounded work divided by the measured speed of one block on this machine ------------


@dataclass(frozen=True)
class CostForecast:
    """Approximate number of passes of the source, over how many tokens, and the time on this machine."""

    passes: float
    tokens: int
    seconds: float

    def describe(self, name: str) -> str:
        """Describe the forecast in one line.

        >>> CostForecast(5.4, 40_960, 251.0).describe("SmolLM2")
        'About 5 passes of SmolLM2 over 40,960 tokens: some 4 minutes here.'
        """
        number, unit = (self.seconds, "second") if self.seconds < 90 else (self.seconds / 60, "minute")
        long = f"some {max(1, round(number)):,} {unit}{'' if round(number) <= 1 else 's'} here"
        return f"About {max(1, round(self.passes))} passes of {name} over {self.tokens:,} tokens: {long}."


def forecast_cost(context: CalibrationContext) -> CostForecast:
    """Forecast the cost within its bounds if every attempt improves, at the speed of one block on a real batch."""
    plan, method, whole = context.plan, context.method, context.samples
    lost = plan.before.depth - plan.after.depth
    ways = zip(plan.before.spans, plan.after.spans, strict=True)  # drop adjacent layers in the middle of every stage
    kept = tuple(i for a, b in ways for i in (*a[: (len(b) + 1) // 2], *a[len(a) - len(b) // 2 :]))
    first, tokens = Candidate(method.kept or kept, ""), context.one_pass
    if lost and method.keep is None:
        part = SampleView.of(context.calibration, TRIAL).batches
        looked = {name: context.tokens(part[name]) for name in PARTS}
        sets = min(choose_layers.BLOCKS, plan.after.depth) + MORE_SETS
        tokens += plan.before.depth * (looked["fit"] + 2 * looked["guard"]) + sets * context.cost(first, part, RACED)
        tokens += (WAYS - 1) * context.cost(first, whole)
    tokens = min(tokens + context.cost(first, whole), context.most_closed)
    rate = time_block(context) / SOLVED
    if method.grows:
        spans = marks(first.kept, plan)
        steps = block_steps(spans, max(1, round(context.tokens(whole["fit"]) / STEP_TOKENS)))
        grown = min(3.0 * STEP_TOKENS * steps, PASSES * context.one_pass, context.most - tokens)
        tokens += grown if method.heal_time is None else min(grown, method.heal_time * rate)
    seen = round(context.one_pass / plan.before.depth)
    return CostForecast(tokens / context.one_pass, seen, tokens / rate)


def time_block(context: CalibrationContext) -> float:
    """Return block-tokens per second of the first block on the first fit batch: best of two runs after a warm-up."""
    stream, took = Stream(context.teacher, context.calibration.fit[:1]), inf
    context.fill(0)
    stream.run()
    for _ in range(2):
        start = time.perf_counter()
        float(stream.run()[0].sum())  # waits until a GPU has finished
        took = min(took, time.perf_counter() - start)
    context.teacher.empty(0)
    hidden = stream.hidden[0]
    return hidden.numel() / hidden.shape[-1] / took
