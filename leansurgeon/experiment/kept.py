"""Which trainings of an earlier call are taken over: those whose result would be the same.

What decides is what changes a result: the task, the training, what is measured, the arm and how it is cut, and for an
arm that is cut from the trained original the training of that, too. Keys that change none (`FREE`) do not count, nor
does a key that the earlier version did not know, where it stands at its default now.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import MISSING, asdict, fields, replace
from typing import Any

from leansurgeon.errors import LeanSurgeonError, UsageError
from leansurgeon.experiment.jobs import Job
from leansurgeon.reading.jsonfile import JsonObject, by_dotted_key
from leansurgeon.surgery.plan.method import Method
from leansurgeon.surgery.plan.wanted import Wanted
from leansurgeon.training.recipe.schema import TrainingRecipe
from leansurgeon.training.runs import checkpoint, resume, summary
from leansurgeon.training.runs.summary import DONE, Part, Summary

CUT_FROM = "last, calibrated"  # which weights of the original an arm is cut from: others are another result
# Keys of a recipe that change no result.
FREE = ("name", "version", "expected", "train.trackers", "train.workers", "train.log_every", "train.eval.batch")
FREE = (*FREE, "train.checkpoint")


def settings_of(job: Job) -> JsonObject:
    """What decides the job's result beside its recipe, by name, as a summary keeps it."""
    recipe = job.experiment
    settings: dict[str, Any] = {"arm": asdict(job.wanted), "method": asdict(job.method) | {"calibrate": job.calibrate}}
    settings |= {"source": recipe.source, "source_config": recipe.source_config}
    if job.transferred:
        settings |= {"cut_from": CUT_FROM, "original": recipe.training(transferred=False).model_dump(mode="json")}
    return settings


def part_of(job: Job) -> Part:
    """Where the job's run belongs."""
    settings = settings_of(job)
    return Part(
        name=job.experiment.name,
        arm=job.arm,
        seed=job.seed,
        digest=digest(job, settings),
        control_of=job.experiment.arms[job.arm].control_of,
        init="transfer" if job.transferred else "fresh",
        own_task=", ".join(f"{key} {value}" for key, value in job.experiment.own_task(job.arm).items()),
        settings=settings,
    )


def digest(job: Job, settings: dict[str, Any]) -> str:
    """All that decides, as a short hash: seeds of one arm share it. Defaults are left out, so that a later version,
    which knows more of them, comes to the same.
    """
    recipes = [training_of(job, seed=0)]
    recipes += [job.experiment.training(transferred=False)] if job.transferred else []
    chosen = [by_dotted_key(recipe.model_dump(mode="json", exclude_defaults=True)) for recipe in recipes]
    chosen = [{key: value for key, value in one.items() if not resume.is_free(key, FREE)} for one in chosen]
    decided = {k: v for k, v in by_dotted_key(settings).items() if not k.startswith("original.") and v != _default(k)}
    return hashlib.sha256(json.dumps([chosen, decided], sort_keys=True).encode()).hexdigest()[:16]


def training_of(job: Job, seed: int | None = None) -> TrainingRecipe:
    """The training that the job is, with its seed."""
    recipe = job.experiment.training(transferred=job.transferred, arm=job.arm)
    update = {"seed": job.seed if seed is None else seed}
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=update)})


def finished(job: Job) -> Summary | None:
    """The summary that an earlier call left of this very job; None where there is none.

    Where it tells of the same result and an older version wrote it, it is marked as this version would. Raises
    `UsageError` where it is the result of other settings.
    """
    done = summary.read_if_whole(job.run)
    if done is None or done.status != DONE:
        return None
    if told := differing(done, job):
        raise _replaced(job, "finished", *told)
    part, old = part_of(job), done.experiment
    if old is None or old.settings is None or old.digest != part.digest:
        done = replace(done, experiment=part)
        with suppress(LeanSurgeonError):  # it may lie where nobody writes
            summary.write(job.run, done)
    return done


def check_interrupted(job: Job) -> None:
    """Raises `UsageError` where the job's folder holds an interrupted training of other settings."""
    if (job.run / "summary.json").is_file() or (newest := checkpoint.newest(job.run)) is None:
        return
    told = resume.first_difference(
        resume.today(checkpoint.read_state(newest)["recipe"]), training_of(job).model_dump(mode="json")
    )
    if told:
        raise _replaced(job, "interrupted", *told)


def _replaced(job: Job, how: str, key: str, old: object, new: object) -> UsageError:
    return UsageError(
        f"{job.run} holds the {how} training of {job.label} with other settings: {key} was {old!r} and is {new!r}.",
        "--force gives it up and trains anew; another name keeps it: --set name=NAME.",
    )


def differing(done: Summary, job: Job) -> tuple[str, Any, Any] | None:
    """The first key that decides and differs, with both values."""
    told = resume.first_difference(resume.today(done.recipe), training_of(job).model_dump(mode="json"), FREE)
    if told or done.experiment is None:
        return told
    before, now = dict(done.experiment.settings or {}), settings_of(job)
    one, other = before.pop("original", None), now.pop("original", None)
    if one and other and (told := resume.first_difference(resume.today(one), other, FREE)):
        return f"{told[0]} of the original", *told[1:]
    before, now = by_dotted_key(before), by_dotted_key(now)
    for key in [*now, *(key for key in before if key not in now)]:
        values = [side.get(key, _default(key)) for side in (before, now)]
        if values[0] != values[1]:
            return key, *values
    return None


_DEFAULTS = {
    f"{name}.{one.name}": one.default for name, of in (("arm", Wanted), ("method", Method)) for one in fields(of)
}


def _default(key: str) -> Any:
    default = _DEFAULTS.get(key)
    return None if default is MISSING else default
