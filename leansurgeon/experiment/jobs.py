"""The trainings of an experiment as values, one per arm and seed; and carrying one of them out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from leansurgeon.checkpoints.source import Source, open_source
from leansurgeon.experiment.arms import method_of
from leansurgeon.experiment.machine import cores
from leansurgeon.reading import jsonfile
from leansurgeon.surgery.plan.method import Method
from leansurgeon.surgery.plan.planning import plan
from leansurgeon.surgery.plan.wanted import Wanted
from leansurgeon.surgery.shrink import Decided
from leansurgeon.training.recipe.reading import dump
from leansurgeon.training.recipe.schema import ExperimentRecipe
from leansurgeon.training.runs import folder as runfolder

CUT_FROM = runfolder.LAST + ", calibrated"  # in the digest: arms cut in another way are not taken over


@dataclass(frozen=True)
class Job:
    """One training: an arm at a seed. `source` is what it is cut from, `start` the model it begins with, `run` where
    it leaves its run.
    """

    experiment: ExperimentRecipe
    arm: str
    seed: int
    wanted: Wanted
    method: Method
    calibrate: bool
    source: str
    start: Path
    run: Path
    digest: str
    prove: bool
    threads: int
    quiet: bool
    anew: bool = False  # an interrupted run of it is given up instead of continued
    processes: int = 1  # that train it: GPUs, or CPU processes where `cpu` is set
    cpu: bool = False

    @property
    def label(self) -> str:
        return f"{self.arm}, seed {self.seed}"

    @property
    def transferred(self) -> bool:
        """Whether it starts from what an earlier training of this experiment has learned."""
        return self.source != self.experiment.source and self.wanted.init == "transfer"


def make_jobs(
    recipe: ExperimentRecipe,
    workspace: Path,
    wanted: dict[str, Wanted],
    first: str,
    parallel: int,
    *,
    force: bool = False,
    processes: int = 1,
    cpu: bool = False,
) -> dict[tuple[str, int], Job]:
    folder, jobs = workspace / recipe.name, {}
    threads = max(1, cores() // parallel)
    for name in recipe.arms:
        for seed in recipe.seeds:
            transfer = name != first and wanted[name].init == "transfer"
            method, calibrate = method_of(name, recipe)
            jobs[name, seed] = Job(
                experiment=recipe,
                arm=name,
                seed=seed,
                wanted=wanted[name],
                method=method,
                calibrate=calibrate,
                source=str(folder / f"{first}-s{seed}" / runfolder.LAST) if transfer else recipe.source,
                start=folder / runfolder.STARTS / f"{name}-s{seed}",
                run=folder / f"{name}-s{seed}",
                digest=digest(recipe, name, wanted[name]),
                prove=seed == recipe.seeds[0],
                threads=threads,
                quiet=parallel > 1,
                anew=force,
                processes=processes,
                cpu=cpu,
            )
    return jobs


def digest(recipe: ExperimentRecipe, arm: str, wanted: Wanted) -> str:
    """What decides an arm's result, as a short hash: an arm is taken over only when this has not changed."""
    only = recipe.model_copy(
        update={
            "task": recipe.task_of(arm),
            "arms": {arm: recipe.arms[arm]},
            "seeds": [0],
            "expected": None,
            "debug": None,
        }
    )
    decided_by = dump(only) + repr(wanted) + repr(method_of(arm, recipe)) + CUT_FROM
    return hashlib.sha256(decided_by.encode()).hexdigest()[:16]


def finished(job: Job) -> dict | None:
    summary = jsonfile.read_object_if_whole(job.run / "summary.json") or {}
    same = jsonfile.value_at(summary, "experiment", "digest") == job.digest
    return summary if same and summary.get("status") == "done" else None


def prepare_data(recipe: ExperimentRecipe, say: Callable[[str], None]) -> int:
    """Generate or read the data once, before several processes want it; returns the number of training samples (of the
    first arm's task, where arms differ in it).
    """
    from leansurgeon import tasks

    sizes = []
    for choice in {repr(choice): choice for choice in map(recipe.task_of, recipe.arms)}.values():
        task = tasks.make(choice.name, choice.options)
        task.prepare(runfolder.cache_dir(), None, workers=cores(), say=say)
        sizes.append(task.size("train"))
    return sizes[0]


def carry_out_job(job: Job) -> dict:
    """In a process of its own: make the starting model, train it, return the summary."""
    import torch

    from leansurgeon.surgery.shrink import carry_out
    from leansurgeon.training.processes.launch import train_on

    torch.set_num_threads(job.threads)
    changes = job.experiment.source_config or None
    source = open_source(job.source, config_changes=changes if job.source == job.experiment.source else None)
    carry_out(start_of(job, source), source, job.start, force=True, check=job.prove)
    return train_on(
        job.processes,
        job.experiment.training(transferred=job.transferred, arm=job.arm),
        job.start,
        job.run,
        seed=job.seed,
        experiment={"name": job.experiment.name, "arm": job.arm, "seed": job.seed, "digest": job.digest}
        | {"control_of": job.experiment.arms[job.arm].control_of, "init": "transfer" if job.transferred else "fresh"}
        | {"own_task": ", ".join(f"{key} {value}" for key, value in job.experiment.own_task(job.arm).items())},
        say=(lambda _: None) if job.quiet else None,
        cpu=job.cpu,
        resume="never" if job.anew else "auto",
        replace=True,  # what cannot be continued: a run that came to no checkpoint, or of another recipe
    )


def start_of(job: Job, source: Source) -> Decided:
    """The surgery that gives a job its starting model; a transfer calibrates on the experiment's training data."""
    from leansurgeon.surgery.shrink import decide

    near = plan(source, job.wanted, job.seed, job.method, calibrated=job.calibrate).exactness == "near"
    data = None
    if near and job.calibrate and source.learned:
        from leansurgeon.measure.data.calibration import from_task

        task = job.experiment.task_of(job.arm)
        data = from_task(task.name, task.options, source, cache=runfolder.cache_dir(), seed=job.seed)
    return decide(source, job.wanted, job.seed, job.method, data)
