"""Calibrated surgery: the sequential pipeline from a plan and sample data to changed tensors. Imports torch.

Teacher (the source) and student (the result) go side by side, one block of each in memory, their hidden states on the
same samples beside them. New layer j is made from a kept source layer; before it is left, its output projections are
refitted (`refit_block`) towards the teacher's hidden state at the input of the *next kept layer*, so a block learns to
say what the dropped ones behind it said, given what the student really has so far. Several candidates (sets of kept
layers, refits with and without the attention's projection) share the teacher's pass; guard samples choose among the
finished ones by the model's output.

Nothing exact is touched: a layer whose input is the teacher's and whose changes are exact is only passed through.
Changed tensors are written to a scratch folder, so memory holds one block of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from leansurgeon.checkpoints.blockwise.stream import Stream
from leansurgeon.checkpoints.recorded.decided import Decisions, GuardScore, Healing, Tried
from leansurgeon.checkpoints.recorded.part import plain
from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import UsageError
from leansurgeon.measure.costs.precision import full_fp32
from leansurgeon.measure.data.batches import tokens_of
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.progress import Say, silent, track
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.shape import SPACINGS, Groups, evenly_per_stage, groups_of
from leansurgeon.surgery import choose_layers, drop_layers, forecast
from leansurgeon.surgery.budget import SMALLER, TRIAL, fitting
from leansurgeon.surgery.candidate_model import CandidateModel
from leansurgeon.surgery.candidates import Candidate, divides_heads, is_near
from leansurgeon.surgery.context import PARTS, CalibrationContext, SampleView, TeacherOutputs
from leansurgeon.surgery.planning import Plan
from leansurgeon.surgery.probes import check_finite, outputs_of
from leansurgeon.surgery.resume import ResumeState
from leansurgeon.surgery.score import CLOSE, judge, race
from leansurgeon.surgery.spans import fit_locally

HALF = 0.6  # a result of at most this share of the layers also tries evenly spaced ones
CHOICE, RESULT = "choice", "result"  # what steps of a cut are called that are kept


@dataclass(frozen=True)
class CalibrationResult:
    """The changed tensors, and the record of every decision."""

    edits: Mapping[str, np.ndarray]
    record: Decisions
    held: ExitStack = field(default_factory=ExitStack, repr=False, compare=False)

    def close(self) -> None:
        """Let the changed tensors go."""
        self.held.close()


def calibrate(
    plan: Plan, calibration: Calibration, say: Say = silent, device: str = "cpu", state: ResumeState | None = None
) -> CalibrationResult:
    """Carry a plan through on sample data, on a `device`. Finished steps go to `state`, or are taken from there.

    Raises `UnsupportedModel` where the model cannot be run block by block, `Diverged` where activations are not finite,
    `UsageError` where the layers asked for do not fit the plan.
    """
    if state and (step := state.get(RESULT)):
        record = Decisions.from_dict(step.record)
        record = replace(record, steps_taken_over=record.steps_taken_over + 1)
        return CalibrationResult(step.tensors, record)
    started = time.monotonic()
    with full_fp32(), torch.no_grad(), ExitStack() as undo:  # full fp32: what is not asked to be in bf16
        context = CalibrationContext(plan, calibration, say, device, state, undo)
        context.choose_products()
        say(forecast.forecast_cost(context).describe(context.source.name))
        chosen, evidence = contest(context)
        whole, (best, *others) = SampleView.of(calibration, None), chosen
        winner, score, teacher = compete(context, whole, [*ways_of(context, best), *others], "refitting layers")
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
    with suppress(OSError):  # what is written next needs the room more; the other steps are there
        context.keep(RESULT, winner.edits, record.as_dict())
        context.state.keep_only(RESULT)
    return CalibrationResult(winner.edits, record, held)


def contest(context: CalibrationContext) -> tuple[list[Candidate], JsonObject]:
    """The candidates that remain after a trial on part of the data, and the numbers behind them."""
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
        chosen += best_of_stages(context)
    contested = {"chosen": plain(chosen), "evidence": evidence, "tried": plain(context.tried)}
    context.keep(CHOICE, {}, contested | {"held_back": context.held_back})
    return chosen, evidence


def best_of_stages(context: CalibrationContext) -> list[Candidate]:
    """Where several stages lose layers, the best block of each together, which nobody has tried yet."""
    scores = {one.kept: one.score.judged_by for one in context.tried if one.criterion.startswith("block")}
    losing = [a.depth > b.depth for a, b in zip(context.plan.before.stages, context.plan.after.stages, strict=True)]
    if sum(losing) < 2 or not scores:
        return []
    kept = choose_layers.combine_stages(context.plan.before.spans, scores)
    known = any(one.kept == kept for one in context.tried)
    misplaced = known or drop_layers.explain_misplaced(context.source, kept)
    return [] if misplaced else [Candidate(kept, "block of every stage")]


def after_trial(context: CalibrationContext, chosen: Sequence[Candidate]) -> float:
    """Block-tokens that the trial may come to, so that any one of the sets can still be refitted on all data."""
    return context.most_closed - context.one_pass - max(context.cost(way, context.samples) for way in chosen)


def affordable(
    context: CalibrationContext, part: SampleView, chosen: list[Candidate]
) -> tuple[SampleView, list[Candidate]]:
    """The part of the data on which sets of layers compete, and those that do: where all would exceed the bound on
    passes, first less data, then fewer sets, those that angles and influence speak for before others.
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
    """Candidates, and the numbers behind them."""
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
    """Candidates by the criterion, and the numbers behind them."""
    before, after, criterion = context.plan.before, context.plan.after, context.method.layers
    batches, masks, answers = (part["guard"] for part in (view.batches, view.masks, view.answers))
    evidence = choose_layers.measure_layers(context.teacher, context.fill, batches, masks, stages, answers)
    sets = {
        "angular": choose_layers.by_angle(evidence),
        "angular, second": choose_layers.by_angle(evidence, rank=1),
        "angular, two blocks": choose_layers.by_angle(evidence, blocks=2),
        "influence": choose_layers.by_influence(evidence),
    }
    if criterion != "auto" or after.depth <= HALF * before.depth:  # far from it, spacing is the worst
        sets |= {name: evenly_per_stage(before, after, stages[0].period, name) for name in SPACINGS}
    if criterion == "auto":
        sets |= choose_layers.blocks(evidence)
        if context.pattern and (near := sets["angular"] or evenly_per_stage(before, after)):
            sets["pattern"] = context.pattern.near(near, before.depth)
    else:
        sets = {criterion: sets[criterion]}
    every = [
        candidate
        for candidate in of_every_kind(context.source, sets)
        if not (candidate.criterion.startswith("pattern") and context.breaks_pattern(candidate.kept))
        and not drop_layers.explain_misplaced(context.source, candidate.kept)
    ]
    if not every:
        raise UsageError(f"Layers cannot be chosen by '{criterion}' here.", "Use --method auto.")
    return every, evidence.as_dict()


def of_every_kind(source: Source, sets: Mapping[str, tuple[int, ...] | None]) -> list[Candidate]:
    """The sets of layers by their names, with one layer of every kind where that is possible; each set once."""
    kinds, by_layers = drop_layers.kinds_of(source), {}
    for name, listed in sets.items():
        if listed:
            kept = drop_layers.with_every_kind(kinds, listed)
            named = name if kept == listed else name + drop_layers.OF_EVERY_KIND
            by_layers.setdefault(kept, Candidate(kept, named))
    return list(by_layers.values())


def ways_of(context: CalibrationContext, best: Candidate) -> list[Candidate]:
    """The ways of healing to try. Behind a post-norm only layers that take over something are refitted."""
    if not context.heals or context.source.architecture.norm != "pre":
        return [best]
    attention = replace(best, attention=True)
    # Later layers, which cost most, are refitted only together with the attention at the cuts, whose refit the block's
    # guard has kept or refused. A local fit does what they do, and more; where the plan changes all, all are healed.
    grows = context.method.grows and best.kept != tuple(range(context.plan.before.depth))
    later = [] if grows or all(is_near(context.plan, i) for i in best.kept) else [replace(attention, later=True)]
    return [best, attention, *later]


def finalists(left: list[tuple[CandidateModel, float]], breaks: Callable[[Sequence[int]], bool]) -> list[Candidate]:
    """The best of those that a trial has left, and one more that a part of the data cannot tell from it: of several
    one that other formats hold (which does not break their pattern), too.
    """
    (best, least), *others = sorted(left, key=lambda pair: pair[1])
    close = [student.candidate for student, score in others if score <= least * CLOSE]
    return [best.candidate, *sorted(close, key=lambda one: breaks(one.kept))[:1]]


# -- carrying out candidates -----------------------------------------------------------------------


def compete(
    context: CalibrationContext, view: SampleView, chosen: list[Candidate], title: str
) -> tuple[CandidateModel, GuardScore, Stream]:
    """Carry out the candidates side by side, as many as the bound on passes has room for. The best on the guard stays,
    with its score and the teacher's stream of the guard behind the last block; the changes of the others are let go.
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
    """Which candidate is the best: the lowest score; of those within `CLOSE` of that one which breaks no pattern that a
    format reads layers by, and where a local fit follows the one with the fewest spans. MiniLM at 4 of 6 layers ends at
    a cosine of 0.9361 from one cut after 5.5 passes, and at 0.9366 from two, which were 0.4 % better before the fit,
    after 9.6.
    """
    close = [i for i, score in enumerate(scores) if score <= CLOSE * min(scores)]
    return min(close, key=lambda i: (costs[i], scores[i], i))


def run_candidates(
    context: CalibrationContext, view: SampleView, chosen: Sequence[Candidate], title: str
) -> tuple[list[CandidateModel], Stream]:
    """Teacher and a student for every candidate from the first layer to the last: behind each source layer the
    teacher's states, and the new layers of the students that stand for it. Returns the students, and the teacher's
    stream of the guard behind the last.
    """
    students = [CandidateModel(context, view, candidate, i) for i, candidate in enumerate(chosen)]
    teacher = context.teacher
    streams = view.streams(teacher)
    for layer in track(range(teacher.depth), title, "layers/s"):
        context.fill(layer)
        due = [s for s in students if s.until == layer]
        attention: list[Tensor] = []
        with ExitStack() as noted:
            # Heads that are divided will be fitted to what the attention alone gives on the samples to fit.
            if divides_heads(context.plan, layer) and any(s.kept[s.at] == layer for s in due):
                attention = noted.enter_context(outputs_of(teacher.projections(layer)[0]))
            fit = streams["fit"].run()
        outputs = TeacherOutputs(layer, streams, {"fit": fit, "guard": streams["guard"].run()}, attention)
        for part in PARTS:
            check_finite(outputs.outputs[part], f"behind layer {layer}")
        for student in sorted(due, key=lambda s: s.makes):  # all that only pass through it share one block
            if student.makes:
                context.give_back()
            student.take(outputs)
        context.give_back()
        teacher.empty(layer)
        for part, stream in streams.items():
            stream.advance(outputs.outputs[part])
    return students, streams["guard"]
