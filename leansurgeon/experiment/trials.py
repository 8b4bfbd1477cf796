"""Preparation of an experiment whose arms are all cut from the source: the cuts, made once for all seeds; a short
training that measures the cost of a step; and for every arm a short trial at each of `rates`.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import Diverged, UsageError, plural
from leansurgeon.experiment.arms import list_wanted_shapes
from leansurgeon.experiment.jobs import Job, find_finished, list_settings, make_jobs, prepare_data
from leansurgeon.experiment.side_by_side import CutLimit, Key, drive, make_start
from leansurgeon.progress import Say, duration_text, size_text
from leansurgeon.reading import jsonfile
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.training.recipe.schema import ExperimentRecipe, merge
from leansurgeon.training.runs import folder as runfolder
from leansurgeon.training.runs import resume
from leansurgeon.training.runs.summary import Summary
from leansurgeon.training.schedule import make_plan

SHARE = 0.125  # of a training's steps, for the trial of a rate
LEAST = 8  # steps of a trial
PROBE = 6  # steps that are timed
FEW, ENOUGH = 16, 48  # least steps of a training, and least for more than one seed
JUDGED, LEAST_JUDGED = 512, 16  # most and least samples of an evaluation during training, if time is short
LOOKS = 3  # evaluations of a training: before, half-way, at the end
LOOKING = 0.1  # share of the time for these
# A trial is evaluated once, on validation data, and leaves nothing behind.
BRIEF = {
    "eval": {"at_start": False, "test": False, "every": "1000000st"},
    "checkpoint": {"keep_best": False, "keep_start": False},
}
KEPT = "cut.json"  # beside a start: a hash of what it was made from, and the time that it had
CUTTING = 0.4  # share of the time for all cuts


def make_starts(
    jobs: Mapping[Key, Job], source: Source, say: Say, limit: CutLimit | None = None, *, anew: bool = False
) -> None:
    """Cut every arm once, each within `limit`; reuse what an earlier call cut from the same weights with the same
    settings. `anew` makes those again that had less time.
    """
    files = resume.origin_of(source.folder) if source.folder else {}
    for job in {job.start: job for job in jobs.values()}.values():
        settings = list_settings(job) | {"task": job.experiment.task_of(job.arm).model_dump(mode="json")}
        made_by = hashlib.sha256(json.dumps([settings, files], sort_keys=True).encode()).hexdigest()
        kept = job.start.with_name(f"{job.start.name}-{KEPT}")
        earlier = jsonfile.read_object_if_whole(kept) or {}
        if (job.start / "config.json").is_file() and earlier.get("made_by") == made_by:
            had = earlier.get("seconds")
            hasty = limit is not None and had is not None and (limit.seconds is None or had < limit.seconds)
            if hasty and not anew:
                say(f"{job.arm}: an earlier call cut it within {duration_text(had)}; --force cuts it again.")
            if not (hasty and anew):
                continue
        say(f"{job.arm}: cutting {source.name}")
        make_start(job, say, limit)
        runfolder.write_json(kept, {"made_by": made_by, "seconds": limit.seconds if limit else None})


def make_trial(job: Job, steps: int, name: str, rate: float, settings: JsonObject) -> Job:
    """Return the job as a short training that only serves to choose a rate; its run is beside the others."""
    recipe = job.experiment
    train = merge({"duration": f"{steps}st", "optim": {"lr": rate}, "eval": {"every": f"{steps}st"}}, settings)
    short = type(recipe.train).model_validate(merge(recipe.train.model_dump(), train))
    arms = recipe.arms | {job.arm: recipe.arms[job.arm].model_copy(update={"train": None})}
    short = recipe.model_copy(update={"train": short, "arms": arms, "measure": None, "rates": []})
    return replace(job, experiment=short, run=job.start.with_name(f"{job.arm}-{name.replace(' ', '-')}"), trial=name)


@dataclass(frozen=True)
class StepCost:
    """Seconds of an optimizer step, and of starting and saving a training; peak bytes."""

    step: float
    rest: float
    memory: int


def time_steps(job: Job, samples: int, library: str, say: Say) -> StepCost:
    """Train the job for a few steps to measure their cost."""
    settings = merge(BRIEF, {"eval": {"samples": LEAST_JUDGED}})
    probe, began = make_trial(job, PROBE, "timing", job.experiment.train.optim.lr, settings), time.perf_counter()
    done: dict[Key, Summary | None] = {}
    drive({(job.arm, job.seed): replace(probe, anew=True, quiet=True)}, done, job.arm, 1, samples, say, library)
    made = done[job.arm, job.seed]
    step = made.step_ms / 1000
    shutil.rmtree(probe.run, ignore_errors=True)
    return StepCost(step, max(0.0, time.perf_counter() - began - PROBE * step), made.memory.bytes or 0)


def choose_rates(
    recipe: ExperimentRecipe,
    jobs: Mapping[Key, Job],
    arms: Sequence[str],
    parallel: int,
    samples: int,
    library: str,
    say: Say,
    *,
    force: bool,
) -> ExperimentRecipe:
    """Return the recipe in which each of these arms has the one of `rates` that did best in its trial, by validation.
    `force` repeats the trials of an earlier call.
    """
    plan = make_plan(recipe.train, samples, 1)
    steps = max(LEAST, round(SHARE * plan.steps))
    seed = recipe.seeds[0]
    arms = [arm for arm in arms if "duration" not in (recipe.arms[arm].train or {})]  # an original that is not trained
    trials = {
        (f"{arm} at {rate:g}", seed): make_trial(jobs[arm, seed], steps, f"rate {rate:g}", rate, BRIEF)
        for arm in arms
        for rate in recipe.rates
    }
    known: dict[Key, Summary] = {}
    for key, job in trials.items():
        old = None
        with suppress(UsageError):  # a trial with other settings may be replaced
            old = None if force else find_finished(job)
        known |= {key: old} if old else {}
    trials = {key: job if key in known else replace(job, anew=True) for key, job in trials.items()}
    done: dict[Key, Summary | None] = dict(known)
    say(f"Trying {plural(len(recipe.rates), 'learning rate')} for every arm, {steps} steps each.")
    drive(trials, done, arms[0], parallel, samples, say, library, "trials of rates")
    chosen = dict(recipe.arms)
    for arm in arms:
        found = {rate: made for rate in recipe.rates if (made := done[f"{arm} at {rate:g}", seed])}
        if not found:
            raise Diverged(f"{arm} diverged at every learning rate that was tried.", "Try less: --set rates=[1e-6].")
        sign = 1 if next(iter(found.values())).task.higher_is_better else -1
        best = max(found, key=lambda rate: (sign * found[rate].final.metric, -found[rate].final.loss))
        figures = ", ".join(f"{rate:g}: {one.task.format_metric(one.final.metric)}" for rate, one in found.items())
        say(f"{arm}: learning rate {best:g} ({figures}).")
        train = merge(chosen[arm].train or {}, {"optim": {"lr": best}})
        chosen[arm] = chosen[arm].model_copy(update={"train": train})
    for job in trials.values():  # their scores stay
        for name in (runfolder.BEST, runfolder.LAST):
            shutil.rmtree(job.run / name, ignore_errors=True)
    return recipe.model_copy(update={"arms": chosen, "rates": []})


def plan_steps(
    recipe: ExperimentRecipe,
    workspace: Path,
    source: Source,
    parallel: int,
    say: Say,
    *,
    seconds: float | None,
    began: float,
    force: bool = False,
    **how: Any,
) -> ExperimentRecipe:
    """Return the recipe with as many steps, seeds and trials of learning rates as fit into `seconds` since `began` (by
    `time.perf_counter`; None: unchanged), make the cuts, and report the total cost. `force` repeats cuts that had less
    time.

    Raises `UsageError` before the cuts if not even one seed fits.
    """
    arms, library = list(recipe.arms), source.architecture.library
    jobs = make_jobs(recipe, workspace, list_wanted_shapes(recipe, source), arms[0], parallel, **how)
    task = prepare_data(recipe, say, arms, source.folder)
    samples, tested = (task.size(split) if split in task.splits else 0 for split in ("train", "test"))
    original = arms[0], recipe.seeds[0]
    make_starts({original: jobs[original]}, source, say)
    cost = time_steps(jobs[original], samples, library, say)
    rates, seeds = len(recipe.rates), len(recipe.seeds)
    side = min(parallel, len(arms))
    # Seconds of a sample: one forward pass of the three that a step takes; without a head, the teacher's too.
    judging = cost.step / ((2 if task.head == "features" else 3) * recipe.train.batch)
    tested *= 2 + (recipe.train.distill is not None)  # start, best, and the teacher
    judged = recipe.train.eval.samples or task.size("eval")
    if seconds is not None and recipe.train.eval.samples is None:
        room = LOOKING * seconds * side / (len(arms) * (LOOKS * seeds + rates) * judging)
        judged = min(judged, max(LEAST_JUDGED, min(JUDGED, int(room))))

    def work(steps: float, seeds: int, rates: int) -> float:
        """Return the seconds of all trainings and their trials; trials are evaluated once, on
        validation data only.
        """
        rest = (seeds + rates) * cost.rest + judging * (seeds * (LOOKS * judged + tested) + rates * judged)
        return len(arms) * (rest + (seeds + rates * SHARE) * steps * cost.step) / side

    if seconds is not None and (least := work(FEW, 1, 0)) > (1 - CUTTING) * seconds:
        raise UsageError(
            f"{duration_text(seconds)} is too short: {plural(len(arms), 'training')} of {FEW} steps each take about "
            f"{duration_text(least)} here, and the cuts need time as well.",
            f"Give --time {math.ceil(1.1 * least / (1 - CUTTING) / 60)}m, or fewer variants.",
        )
    share = None if seconds is None else CUTTING * seconds / (len(arms) - 1)
    make_starts(jobs, source, say, CutLimit(share, judging), anew=force)
    steps = make_plan(recipe.train, samples, 1).steps if seconds is None else 0
    while seconds is not None:
        spent = time.perf_counter() - began
        left = 0.9 * (seconds - spent) - work(0, seeds, rates)
        steps = int(left * side / (len(arms) * (seeds + rates * SHARE) * cost.step))
        if steps >= (ENOUGH if seeds > 1 else FEW):
            break
        if seeds > 1:
            seeds -= 1
        elif rates:
            rates = 0
        else:
            steps = FEW
            if (longer := spent + work(FEW, 1, 0)) > seconds:
                say(f"All of it will take about {duration_text(longer)}: {FEW} steps of each training are the fewest.")
            break
    if seeds < len(recipe.seeds):
        say(f"{duration_text(seconds)} has room for {plural(seeds, 'seed')}, not for {len(recipe.seeds)}.")
    if rates < len(recipe.rates):
        say(f"{duration_text(seconds)} has no room to try learning rates: {recipe.train.optim.lr:g} is used.")
    tried = f", after {plural(len(arms) * rates, 'trial')} of learning rates" if rates else ""
    say(
        f"{plural(len(arms), 'arm')} ({', '.join(arms)}) x {plural(seeds, 'seed')} = {len(arms) * seeds} trainings of "
        f"{plural(steps, 'step')}{tried}: about {duration_text(work(steps, seeds, rates))} here, {side} at a time, "
        f"{size_text(cost.memory)} of memory each."
    )
    if seconds is None:
        return recipe
    every = {"every": f"{max(1, steps // 2)}st", "samples": judged}
    train = merge(recipe.train.model_dump(), {"duration": f"{steps}st", "eval": every})
    train = type(recipe.train).model_validate(train)
    return recipe.model_copy(update={"train": train, "seeds": recipe.seeds[:seeds], "rates": recipe.rates[:rates]})
