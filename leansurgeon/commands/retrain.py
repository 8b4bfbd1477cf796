"""Retrain: the model, the recipe that it is trained by, the run folder, and the training itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from leansurgeon.commands import healing
from leansurgeon.errors import UsageError
from leansurgeon.progress import Say
from leansurgeon.rank import is_worker, rank
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.training.processes import environment
from leansurgeon.training.processes.launch import check_gpus
from leansurgeon.training.recipe.asked import Asked
from leansurgeon.training.recipe.schema import TrainingRecipe
from leansurgeon.training.runs import checkpoint
from leansurgeon.training.runs import folder as runfolder
from leansurgeon.training.runs.resume import interrupted
from leansurgeon.training.runs.summary import Summary


@dataclass(frozen=True)
class Running:
    """What is asked beside model and recipe (`Asked`): where the training runs, and where its folder lies."""

    gpus: int | None = None
    cpu_processes: int | None = None
    seed: int | None = None
    out: Path | None = None
    workspace: Path = Path("runs")
    resume_anyway: bool = False
    limit_batches: int | None = None

    @property
    def processes(self) -> int:
        """How many processes train."""
        return self.gpus or self.cpu_processes or 1

    @property
    def cpu(self) -> bool:
        """Whether a GPU is left alone."""
        return self.cpu_processes is not None

    def check(self) -> None:
        """Raises `UsageError` for numbers that cannot be."""
        if self.gpus is not None and self.cpu_processes is not None:
            raise UsageError("--gpus and --cpu-processes exclude each other.")
        for flag, number in (("--cpu-processes", self.cpu_processes), ("--gpus", self.gpus)):
            if number is not None and number < 1:
                raise UsageError(f"{flag} must be at least 1, and {number} was given.")


@dataclass(frozen=True)
class Ready:
    """A model folder and the resolved recipe that it is trained by."""

    folder: Path
    recipe: TrainingRecipe


@dataclass(frozen=True)
class Trained:
    """What a training came to: its summary, its run folder, and the folder that it began with."""

    summary: Summary
    folder: Path
    start: Path

    @property
    def best(self) -> Path:
        """The folder of the best model."""
        return self.folder / runfolder.BEST

    def as_dict(self) -> JsonObject:
        """What --json prints."""
        return self.summary.as_dict()


def prepare(model: Path | None, how: Asked, asked: Running, say: Say, *, start: bool = True) -> Ready:
    """The model (None: the newest shrunk one) and its recipe, as this machine can carry it out. `start` False is for a
    look at it alone.

    Raises `UsageError` for what excludes each other, or is not there.
    """
    asked.check()
    environment.group_size()
    folder = runfolder.model_of(model) if model is not None else runfolder.newest_shrunk(asked.workspace)
    settings = healing.recipe_of(folder, how, say)
    if asked.seed is not None:
        settings = settings.model_copy(update={"train": settings.train.model_copy(update={"seed": asked.seed})})
    settings = healing.for_device(settings, cpu=asked.cpu, say=say)
    if asked.gpus is not None and start and not is_worker():
        check_gpus(asked.gpus)
    return Ready(folder, settings)


def retrain(ready: Ready, how: Asked, asked: Running, say: Say, *, began: float, talk: Say | None = None) -> Trained:
    """Train, and leave a run folder. `began` is when the command began, by `time.perf_counter`; `talk` takes the
    training's own lines (None: a progress line on stderr).

    Raises what `training.train.train` raises.
    """
    from leansurgeon.training.together import train_on

    run_dir = run_folder(ready, how.resume, asked, say)
    summary = train_on(
        asked.processes,
        ready.recipe,
        ready.folder,
        run_dir,
        cpu=asked.cpu,
        say=talk,
        resume=how.resume,
        resume_anyway=asked.resume_anyway,
        limit_batches=asked.limit_batches,
        began=began,
    )
    # A run that is resumed names the recipe that was made for it, and no data.
    heals = how.data is not None or ready.recipe.train.checkpoint.keep_start
    if heals and (told := healing.did_it_help(summary, ready.folder)):
        say(told)
    return Trained(summary, run_dir, ready.folder)


def run_folder(ready: Ready, resume: str, asked: Running, say: Say) -> Path:
    """Where the run goes: `-o`, the run that is resumed, or a new folder in the workspace."""
    out, workspace, settings = asked.out, asked.workspace, ready.recipe
    if resume not in ("auto", "never"):
        run_dir = checkpoint.located(Path(resume))[0]
        if out is not None and out.resolve() != run_dir.resolve():
            raise UsageError(f"--resume {resume} goes on in {run_dir}, and -o says {out}.", "Leave -o out.")
        return run_dir
    if out is not None:
        return out
    new = runfolder.new_run(workspace, settings.name, settings.train.seed)
    if rank() > 0:
        return new  # rank 0 says which
    unfinished = interrupted(workspace, settings, ready.folder) if workspace.is_dir() else None
    if unfinished is not None and resume == "auto":
        return unfinished
    if unfinished is not None:
        say(f"An interrupted run of this recipe is in {unfinished}; --resume auto goes on with it.")
    return new
