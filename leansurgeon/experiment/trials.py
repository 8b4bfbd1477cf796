"""An experiment for the user's own model and data: the original, lean variants and their controls, all cut from the
model as it is and trained alike, with the recipe that `retrain --data` would make. And the preparation of an experiment
whose arms are all cut from the source: the cuts, made once for all seeds; a short training that measures the cost of a
step; and for every arm a short trial at each of `rates`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import Diverged, LeanSurgeonError, UsageError, did_you_mean, plural
from leansurgeon.experiment.arms import list_wanted_shapes, wanted_by_arm, wanted_shape_of
from leansurgeon.experiment.jobs import Job, find_finished, list_settings, make_jobs, prepare_data
from leansurgeon.experiment.side_by_side import Key, drive, make_start
from leansurgeon.progress import Say, duration_text, size_text
from leansurgeon.reading.cache_folder import cache_folder
from leansurgeon.reading.jsonfile import JsonObject, read_object_if_whole
from leansurgeon.surgery.planning import plan, reshape_source
from leansurgeon.tasks import user_data
from leansurgeon.training.recipe import from_model
from leansurgeon.training.recipe import reading as recipes
from leansurgeon.training.recipe.schema import Arm, ExperimentRecipe, TrainingRecipe, merge
from leansurgeon.training.runs import folder as runfolder
from leansurgeon.training.runs import resume
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
KEYS = ("heads", "layers", "head_dim", "mlp_dim")
STEPS_OF_RATE = (1 / 3, 1, 3)  # times the usual learning rate
KAPPA = {"samples": 16, "probes": 0}  # measured for every arm, takes seconds


def parse_variants(texts: Sequence[str]) -> dict[str, dict[str, str]]:
    """Parse texts such as `lean:heads=24,layers=4` into shapes by name. Raises `UsageError`."""
    found: dict[str, dict[str, str]] = {}
    for text in texts:
        name, colon, rest = text.partition(":")
        pairs = [part.partition("=") for part in re.split(r",(?=\w+=)", rest)]
        shape = {key.strip(): value.strip() for key, _, value in pairs}
        if not colon or not re.fullmatch(r"\w[\w.-]*", name) or not all(shape.values()):
            raise UsageError(f"--variant {text}: write NAME:heads=24,layers=4.")
        if unknown := [key for key in shape if key not in KEYS]:
            near = did_you_mean(unknown[0], KEYS)
            raise UsageError(
                f"--variant {text}: {unknown[0]!r} is no part of a shape{near}.", f"Give {', '.join(KEYS)}."
            )
        if name in found or name == "original":
            raise UsageError(f"--variant {text}: the name {name} is taken.", "Give each variant a name of its own.")
        found[name] = shape
    return found


def name_experiment(source: Source, data: str, sets: Sequence[str]) -> str:
    """Return a name such as `model-reviews`, or that of --set name=NAME."""
    named = [text.partition("=")[2] for text in sets if text.startswith("name=")]
    return named[-1] if named else f"{from_model.name_of(Path(source.folder))}-{user_data.recognise(data).slug}"


def make_experiment(
    source: Source,
    data: str,
    variants: Mapping[str, Mapping[str, str]],
    seeds: Sequence[int],
    seconds: float | None,
    parallel: int,
    columns: str | None,
    sets: Sequence[str],
    say: Say,
) -> ExperimentRecipe:
    """Return the recipe: its arms, the task and settings that all share, and three learning rates around the usual one.

    If everything must fit into `seconds`, with `parallel` trainings side by side, batches are small enough for that.
    Raises `UsageError` if model, data and shapes do not fit together.
    """
    for name, shape in variants.items():  # refuse impossible shapes before reading data
        try:
            plan(source, wanted_by_arm(Arm.model_validate(shape)), 0, calibrated=True)
        except LeanSurgeonError as error:
            error.message = f"{name}: {error.message}"
            raise
        except ValueError:  # only head_dim accepts no text but a few words
            said = f"{name}: head_dim {shape.get('head_dim')}: give auto, keep, split or a number."
            raise UsageError(said) from None
    own = [text for text in sets if text.partition("=")[0].split(".")[0] in TrainingRecipe.model_fields]
    each = seconds and seconds * parallel / (2 * (1 + 2 * len(variants)) * len(seeds))
    asked = from_model.RecipeInputs(
        data, f"{max(1, each):.0f}s" if each else None, columns, sets=tuple(own), compares=True
    )
    training = from_model.make_recipe(Path(source.folder), user_data.recognise(data), asked, cache_folder(), say)
    raw = recipes.plain(training)
    optim = raw["train"]["optim"]
    optim.pop("full_steps", None)  # use the rates to be tried as they are
    rates = [float(f"{optim['lr'] * times:.2g}") for times in STEPS_OF_RATE]
    arms = {"original": {}} | {name: {**shape, "heal": "local"} for name, shape in variants.items()}
    if training.train.distill and training.train.distill.logits == 0:
        arms["original"] = {"train": {"duration": "1st"}}  # it would learn its own embeddings
    raw |= {"kind": "experiment", "source": str(source.folder), "cut_from": "source", "seeds": list(seeds)}
    fixed = any(text.startswith("train.optim.lr=") for text in sets)
    raw |= {"rates": [] if fixed else rates, "measure": {"kappa": KAPPA}, "arms": arms}
    for name in variants:
        control = "control" if len(variants) == 1 else f"control-{name}"
        whole = ExperimentRecipe.model_validate(raw | {"arms": arms | {control: {"control_of": name}}})
        shape, lean = (reshape_source(source, wanted_shape_of(arm, whole, source))[0].shape for arm in (control, name))
        if shape not in (source.shape, lean):  # else it shows nothing
            arms[control] = {"control_of": name}
    return recipes.check_recipe(raw | {"arms": arms}, [text for text in sets if text not in own], f"--data {data}")


def make_starts(
    jobs: Mapping[Key, Job],
    source: Source,
    say: Say,
    seconds: float | None = None,
    forward: float | None = None,
    *,
    anew: bool = False,
) -> None:
    """Cut every arm once; reuse what an earlier call cut from the same weights with the same settings. With `forward`,
    the time of a forward pass of one sample, each has `seconds` (None: as much as it needs), and `anew` makes those
    again that had less.
    """
    files = resume.origin_of(source.folder) if source.folder else {}
    for job in {job.start: job for job in jobs.values()}.values():
        settings = list_settings(job) | {"task": job.experiment.task_of(job.arm).model_dump(mode="json")}
        made_by = hashlib.sha256(json.dumps([settings, files], sort_keys=True).encode()).hexdigest()
        kept = job.start.with_name(f"{job.start.name}-{KEPT}")
        earlier = read_object_if_whole(kept) or {}
        if (job.start / "config.json").is_file() and earlier.get("made_by") == made_by:
            had = earlier.get("seconds")
            hasty = forward is not None and had is not None and (seconds is None or had < seconds)
            if hasty and not anew:
                say(f"{job.arm}: an earlier call cut it within {duration_text(had)}; --force cuts it again.")
            if not (hasty and anew):
                continue
        say(f"{job.arm}: cutting {source.name}")
        make_start(job, say, seconds, forward)
        runfolder.write_json(kept, {"made_by": made_by, "seconds": seconds})


def make_trial(job: Job, steps: int, name: str, rate: float, settings: JsonObject) -> Job:
    """Return the job as a short training that only serves to choose a rate; its run is beside the others."""
    recipe = job.experiment
    train = merge({"duration": f"{steps}st", "optim": {"lr": rate}, "eval": {"every": f"{steps}st"}}, settings)
    short = type(recipe.train).model_validate(merge(recipe.train.model_dump(), train))
    arms = recipe.arms | {job.arm: recipe.arms[job.arm].model_copy(update={"train": None})}
    short = recipe.model_copy(update={"train": short, "arms": arms, "measure": None, "rates": []})
    return replace(job, experiment=short, run=job.start.with_name(f"{job.arm}-{name.replace(' ', '-')}"), trial=name)


def time_steps(job: Job, samples: int, library: str, say: Say) -> tuple[float, float, int]:
    """Train the job for a few steps; return the seconds of a step, those of starting and saving, and peak bytes."""
    settings = merge(BRIEF, {"eval": {"samples": LEAST_JUDGED}})
    probe, began = make_trial(job, PROBE, "timing", job.experiment.train.optim.lr, settings), time.perf_counter()
    done = {}
    drive({(job.arm, job.seed): replace(probe, anew=True, quiet=True)}, done, job.arm, 1, samples, say, library)
    made = done[job.arm, job.seed]
    step = made.step_ms / 1000
    shutil.rmtree(probe.run, ignore_errors=True)
    return step, max(0.0, time.perf_counter() - began - PROBE * step), made.memory.bytes or 0


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
    known = {}
    for key, job in trials.items():
        old = None
        with suppress(UsageError):  # a trial with other settings may be replaced
            old = None if force else find_finished(job)
        known |= {key: old} if old else {}
    trials = {key: job if key in known else replace(job, anew=True) for key, job in trials.items()}
    done = dict(known)
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
    a_step, around, memory = time_steps(jobs[original], samples, library, say)
    rates, seeds = len(recipe.rates), len(recipe.seeds)
    side = min(parallel, len(arms))
    # Seconds of a sample: one forward pass of the three that a step takes; without a head, the teacher's too.
    judging = a_step / ((2 if task.head == "features" else 3) * recipe.train.batch)
    tested *= 2 + (recipe.train.distill is not None)  # start, best, and the teacher
    judged = recipe.train.eval.samples or task.size("eval")
    if seconds is not None and recipe.train.eval.samples is None:
        room = LOOKING * seconds * side / (len(arms) * (LOOKS * seeds + rates) * judging)
        judged = min(judged, max(LEAST_JUDGED, min(JUDGED, int(room))))

    def work(steps: float, seeds: int, rates: int) -> float:
        """Return the seconds of all trainings and their trials; trials are evaluated once, on
        validation data only.
        """
        rest = (seeds + rates) * around + judging * (seeds * (LOOKS * judged + tested) + rates * judged)
        return len(arms) * (rest + (seeds + rates * SHARE) * steps * a_step) / side

    if seconds is not None and (least := work(FEW, 1, 0)) > (1 - CUTTING) * seconds:
        raise UsageError(
            f"{duration_text(seconds)} is too short: {plural(len(arms), 'training')} of {FEW} steps each take about "
            f"{duration_text(least)} here, and the cuts need time as well.",
            f"Give --time {math.ceil(1.1 * least / (1 - CUTTING) / 60)}m, or fewer variants.",
        )
    share = None if seconds is None else CUTTING * seconds / (len(arms) - 1)
    make_starts(jobs, source, say, share, judging, anew=force)
    steps = make_plan(recipe.train, samples, 1).steps if seconds is None else 0
    while seconds is not None:
        spent = time.perf_counter() - began
        left = 0.9 * (seconds - spent) - work(0, seeds, rates)
        steps = int(left * side / (len(arms) * (seeds + rates * SHARE) * a_step))
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
        f"{size_text(memory)} of memory each."
    )
    if seconds is None:
        return recipe
    every = {"every": f"{max(1, steps // 2)}st", "samples": judged}
    train = merge(recipe.train.model_dump(), {"duration": f"{steps}st", "eval": every})
    train = type(recipe.train).model_validate(train)
    return recipe.model_copy(update={"train": train, "seeds": recipe.seeds[:seeds], "rates": recipe.rates[:rates]})
