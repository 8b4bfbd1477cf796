"""The trainings of an experiment as values, one per arm and seed; and which results of an earlier call are reused:
those that would come out the same.

A result depends on the task, the training, what is measured, the arm and how it is cut and, for an arm that is cut from
the trained original, on the training of that too. Keys that change no result (`FREE`) do not count, nor does a key that
an earlier version did not have if it is at its default now.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from leansurgeon import tasks
from leansurgeon.errors import UsageError
from leansurgeon.experiment.arms import method_of
from leansurgeon.progress import Say
from leansurgeon.rank import cores
from leansurgeon.reading.cache_folder import cache_folder
from leansurgeon.reading.jsonfile import JsonObject, by_dotted_key
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.training.recipe.schema import ExperimentRecipe, TrainingRecipe
from leansurgeon.training.runs import checkpoint, resume, summary
from leansurgeon.training.runs import folder as runfolder
from leansurgeon.training.runs.summary import DONE, Part, Summary


@dataclass(frozen=True)
class Job:
    """One training: an arm at a seed. `source` is what it is cut from, `start` the model it begins with, `run` its run
    folder.
    """

    experiment: ExperimentRecipe
    arm: str
    seed: int
    wanted: RequestedShape
    method: Method
    source: str
    start: Path
    run: Path
    prove: bool
    threads: int
    quiet: bool
    anew: bool = False  # discard an interrupted run of it instead of resuming
    processes: int = 1  # that train it: GPUs, or CPU processes if `cpu` is set
    cpu: bool = False
    trial: str = ""  # what a short trial training tests: a learning rate

    @property
    def label(self) -> str:
        return f"{self.arm}, {self.trial or f'seed {self.seed}'}"

    @property
    def transferred(self) -> bool:
        """Whether it starts from the trained weights of an earlier training of this experiment."""
        return self.source != self.experiment.source and self.wanted.init == "transfer"


def make_jobs(
    recipe: ExperimentRecipe,
    workspace: Path,
    wanted: dict[str, RequestedShape],
    first: str,
    parallel: int,
    *,
    processes: int = 1,
    cpu: bool = False,
) -> dict[tuple[str, int], Job]:
    folder, jobs = workspace / recipe.name, {}
    threads = max(1, cores() // parallel)
    for name in recipe.arms:
        for seed in recipe.seeds:
            trained = recipe.cut_from == "original"
            transfer = trained and name != first and wanted[name].init == "transfer"
            jobs[name, seed] = Job(
                experiment=recipe,
                arm=name,
                seed=seed,
                wanted=wanted[name],
                method=method_of(name, recipe),
                source=str(folder / f"{first}-s{seed}" / runfolder.LAST) if transfer else recipe.source,
                start=folder / runfolder.STARTS / (f"{name}-s{seed}" if trained else name),
                run=folder / f"{name}-s{seed}",
                prove=seed == recipe.seeds[0],
                threads=threads,
                quiet=parallel > 1,
                processes=processes,
                cpu=cpu,
            )
    return jobs


def prepare_data(
    recipe: ExperimentRecipe,
    say: Say,
    arms: Iterable[str] | None = None,
    model_dir: Path | None = None,
) -> tasks.Task:
    """Generate or read the data of these arms (default: all) once, before several processes need it, and return the
    task, that of the first arm if arms differ.

    If the recipe asks for the model's own tokenizer, it is the one in `model_dir`.
    """
    made = []
    for choice in {repr(choice): choice for choice in map(recipe.task_of, arms or recipe.arms)}.values():
        task = tasks.make(choice.name, choice.options)
        task.prepare(cache_folder(), model_dir, workers=cores(), say=say)
        made.append(task)
    return made[0]


CUT_FROM = "last, calibrated"  # the original's weights that an arm is cut from; others give another result
# Recipe keys that change no result.
FREE = ("name", "version", "expected", "train.trackers", "train.workers", "train.log_every", "train.eval.batch")
FREE = (*FREE, "train.checkpoint")


def list_settings(job: Job) -> JsonObject:
    """Return what determines the job's result besides its recipe, by name, as stored in a summary."""
    recipe = job.experiment
    method = asdict(job.method) | {"calibrate": not job.method.uncalibrated}
    settings = {"arm": asdict(job.wanted), "method": method}
    settings |= {"source": recipe.source, "source_config": recipe.source_config}
    if job.transferred:
        settings |= {"cut_from": CUT_FROM, "original": recipe.training(transferred=False).model_dump(mode="json")}
    return settings


def describe_part(job: Job) -> Part:
    """Return where the job's run belongs in the experiment, with a short hash of all that determines the result, shared
    by an arm's seeds. Defaults are left out of it, so that a later version with more settings gives the same hash.
    """
    settings, recipes = list_settings(job), [get_training(job, seed=0)]
    recipes += [job.experiment.training(transferred=False)] if job.transferred else []
    chosen = [by_dotted_key(recipe.model_dump(mode="json", exclude_defaults=True)) for recipe in recipes]
    chosen = [{key: value for key, value in one.items() if not resume.is_free(key, FREE)} for one in chosen]
    decided = {k: v for k, v in by_dotted_key(settings).items() if not k.startswith("original.") and v != _default(k)}
    return Part(
        name=job.experiment.name,
        arm=job.arm,
        seed=job.seed,
        digest=hashlib.sha256(json.dumps([chosen, decided], sort_keys=True).encode()).hexdigest()[:16],
        control_of=job.experiment.arms[job.arm].control_of,
        init="transfer" if job.transferred else "fresh",
        own_task=", ".join(f"{key} {value}" for key, value in job.experiment.own_task(job.arm).items()),
        settings=settings,
    )


def get_training(job: Job, seed: int | None = None) -> TrainingRecipe:
    """Return the job's training recipe, with its seed."""
    recipe = job.experiment.training(transferred=job.transferred, arm=job.arm)
    update = {"seed": job.seed if seed is None else seed}
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=update)})


def find_finished(job: Job) -> Summary | None:
    """Return the summary that an earlier call left for this job; None if there is none. Raises `UsageError` if it has
    other settings.
    """
    done = summary.read_if_whole(job.run)
    if done is None or done.status != DONE:
        return None
    if told := first_change(done, job):
        raise _would_replace(job, "finished", *told)
    return done


def check_interrupted(job: Job) -> None:
    """Raise `UsageError` if the job's folder holds an interrupted training with other settings."""
    if (job.run / "summary.json").is_file() or (newest := checkpoint.newest(job.run)) is None:
        return
    told = resume.first_difference(
        resume.today(checkpoint.read_state(newest)["recipe"]), get_training(job).model_dump(mode="json")
    )
    if told:
        raise _would_replace(job, "interrupted", *told)


def _would_replace(job: Job, how: str, key: str, old: object, new: object) -> UsageError:
    return UsageError(
        f"{job.run} holds the {how} training of {job.label} with other settings: {key} was {old!r} and is {new!r}.",
        "--force replaces it by a new training; another name keeps it: --set name=NAME.",
    )


def first_change(done: Summary, job: Job) -> tuple[str, Any, Any] | None:
    """Return the first key that affects the result and differs, with both values."""
    told = resume.first_difference(resume.today(done.recipe), get_training(job).model_dump(mode="json"), FREE)
    if told or done.experiment is None:
        return told
    before, now = dict(done.experiment.settings or {}), list_settings(job)
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
    f"{name}.{one.name}": one.default
    for name, of in (("arm", RequestedShape), ("method", Method))
    for one in fields(of)
}


def _default(key: str) -> Any:
    default = _DEFAULTS.get(key)
    return None if default is MISSING else default
