"""The trainings of an experiment as values, one per arm and seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from leansurgeon import tasks
from leansurgeon.experiment.arms import method_of
from leansurgeon.rank import cores
from leansurgeon.reading.cache_folder import cache_folder
from leansurgeon.surgery.plan.method import Method
from leansurgeon.surgery.plan.wanted import Wanted
from leansurgeon.training.recipe.schema import ExperimentRecipe
from leansurgeon.training.runs import folder as runfolder


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
                prove=seed == recipe.seeds[0],
                threads=threads,
                quiet=parallel > 1,
                processes=processes,
                cpu=cpu,
            )
    return jobs


def prepare_data(recipe: ExperimentRecipe, say: Callable[[str], None], arms: Iterable[str] | None = None) -> int:
    """Generate or read the data of these arms (all by default) once, before several processes want it; returns the
    number of training samples (of the first arm's task, where arms differ in it).
    """
    sizes = []
    for choice in {repr(choice): choice for choice in map(recipe.task_of, arms or recipe.arms)}.values():
        task = tasks.make(choice.name, choice.options)
        task.prepare(cache_folder(), None, workers=cores(), say=say)
        sizes.append(task.size("train"))
    return sizes[0]
