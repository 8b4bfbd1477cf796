"""Run one training on several processes: this one, or worker processes that it starts."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from leansurgeon.checkpoints.publish.durable import scratch
from leansurgeon.errors import Terminated
from leansurgeon.progress import Say
from leansurgeon.progress import say as to_stderr
from leansurgeon.rank import is_worker
from leansurgeon.reading import jsonfile
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.training.loop import train
from leansurgeon.training.processes import launch
from leansurgeon.training.recipe.schema import TrainingRecipe
from leansurgeon.training.runs import folder as runfolder
from leansurgeon.training.runs.summary import Part, Summary
from leansurgeon.training.setup import prepare_task


def train_on(
    processes: int,
    recipe: TrainingRecipe,
    model_dir: Path,
    run_dir: Path,
    *,
    experiment: Part | None = None,
    say: Say | None = None,
    **options: Any,
) -> Summary:
    """Run `loop.train` on `processes` processes: GPUs with NCCL, or CPU processes with gloo if `cpu` is set.

    `options` are those of `train` that JSON can hold. With one process, or inside a worker, this is `loop.train`
    itself. The data is prepared here, before there is a process group that could time out meanwhile. Raises the error
    of the first worker that failed.
    """
    if processes == 1 or is_worker():
        return train(recipe, model_dir, run_dir, experiment=experiment, say=say, **options)
    if options.get("resume", "never") == "never":
        runfolder.check_free(run_dir, replace=options.get("replace", False))  # before anything is started
    prepare_task(recipe, model_dir, say or to_stderr)
    job = {"recipe": recipe.model_dump(mode="json"), "model_dir": str(model_dir.resolve())}
    job |= {"run_dir": str(run_dir.resolve()), "options": options | {"experiment": experiment and experiment.as_dict()}}
    with scratch() as folder:
        (folder / launch.JOB).write_text(json.dumps(job))
        with launch.passing_on(folder) as received:
            well = launch.run_workers(processes, ["-m", "leansurgeon.training.processes.worker", str(folder)])
        if well:
            return Summary.from_dict(jsonfile.read_object(folder / launch.ANSWER))
        error = launch.read_verdict(folder, run_dir)
    if received and isinstance(error, launch.SilentExit):  # the signal came before there was anything to save
        raise Terminated if received[0] != signal.SIGINT else KeyboardInterrupt
    raise error


def carry_out(job: JsonObject) -> JsonObject:
    """Do the job of `train_on` in a worker, all workers together, and return its answer."""
    recipe, model_dir, options = TrainingRecipe.model_validate(job["recipe"]), Path(job["model_dir"]), job["options"]
    options["experiment"] = options["experiment"] and Part.from_dict(options["experiment"])
    return train(recipe, model_dir, Path(job["run_dir"]), **options).as_dict()
