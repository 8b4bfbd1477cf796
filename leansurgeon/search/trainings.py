"""Try candidates by short trainings: every rung is an experiment of its own in the search's folder, whose arms are the
candidates, with the recipe's schedule over a share of its length. Finished trainings are reused and interrupted ones
resume, as in `leansurgeon run`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import sqrt
from pathlib import Path
from typing import Any

from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import Diverged, LeanSurgeonError
from leansurgeon.experiment.jobs import Job, find_finished, make_jobs, prepare_data
from leansurgeon.experiment.side_by_side import Key, default_parallel, drive
from leansurgeon.intervals import binomial_variance
from leansurgeon.progress import Say, silent
from leansurgeon.search.halving import Result, Results, Rung, Score
from leansurgeon.search.space import Candidate
from leansurgeon.training.recipe.durations import parse_duration
from leansurgeon.training.recipe.schema import ExperimentRecipe, Train, TrainingRecipe
from leansurgeon.training.runs import folder as runfolder
from leansurgeon.training.runs.summary import Scores

ORIGINAL = "original"  # the source itself; trained weights are cut from its own folder
LENGTH = Fraction(1, 4)  # share of the recipe's length that the last rung gets


@dataclass
class Trainings:
    """Trains candidates. `recipe` describes the full training."""

    source: Source
    recipe: TrainingRecipe
    folder: Path
    seed: int = 0
    source_config: dict[str, Any] | None = None  # changes to a preset's config
    say: Say = silent

    def attempt(self, rung: Rung, candidates: Sequence[Candidate]) -> Results:
        """Return the scores of one rung: the task's metric at the end of training."""
        jobs, parallel = self.jobs(rung, candidates), default_parallel()
        task = prepare_data(next(iter(jobs.values())).experiment, self.say, model_dir=self.source.folder)
        samples = task.size("train")
        failed = {}
        given = {} if self.source.weights is None else {(ORIGINAL, self.seed): None}
        while True:
            left = {key: job for key, job in jobs.items() if key[0] not in failed}
            done = given | {key: old for key, job in left.items() if (old := find_finished(job))}
            try:
                library, title = self.source.architecture.library, f"rung {rung.number}"
                drive(left | given, done, ORIGINAL, parallel, samples, self.say, library, title)
                break
            except Diverged as error:  # one shape may diverge at this rate; the others may not
                name = next((n for n, s in left if error.message.startswith(f"{jobs[n, s].label}: ")), None)
                if name is None:
                    raise
                self.say(error.message)
                failed[name] = error.message
        if rung.share < 1:
            for job in jobs.values():
                forget_weights(job)
        results = {}
        for name in (candidate.name for candidate in candidates):
            if name in failed:
                results[name] = Result(None, failed[name])
                continue
            task, final = done[name, self.seed].task, done[name, self.seed].final or Scores()
            if final.metric is None or final.loss is None:
                raise LeanSurgeonError("A training left no metric.")
            right = task.percent and "accuracy" in task.metric
            error = sqrt(binomial_variance(final.metric, task.eval_samples)) if right else None
            kind = (task.metric_label, task.higher_is_better, task.percent)
            results[name] = Result(Score(final.metric, *kind, final.loss, task.eval_samples, error))
        return results

    def jobs(self, rung: Rung, candidates: Sequence[Candidate]) -> dict[Key, Job]:
        """Return one training for every candidate."""
        wanted, arms = {c.name: c.wanted for c in candidates}, {}
        for name, shape in wanted.items():
            numbers = {"heads": shape.heads, "layers": shape.layers, "mlp_dim": shape.mlp_dim}
            head_dim = int(shape.head_dim) if shape.head_dim.isdigit() else shape.head_dim
            given = {key: value for key, value in numbers.items() if value}
            arms[name] = given | {"head_dim": head_dim, "init": shape.init}
        recipe = ExperimentRecipe.model_validate(
            {
                "name": f"rung{rung.number}",
                "kind": "experiment",
                "source": self.source.preset.name if self.source.weights is None else ORIGINAL,
                "source_config": self.source_config or {},
                "seeds": [self.seed],
                "task": self.recipe.task.model_dump(),
                "train": shorten_training(self.recipe.train, rung.share * LENGTH).model_dump(),
                "measure": None,
                "arms": arms,
            }
        )
        made = make_jobs(recipe, self.folder, wanted, "", default_parallel())
        learned = {} if self.source.weights is None else {"source": str(self.source.folder)}
        return {key: replace(job, prove=False, **learned) for key, job in made.items()}


def forget_weights(job: Job) -> None:
    """Delete the models of a training, which take much space; the search only needs its summary."""
    for folder in (job.start, job.run / runfolder.BEST, job.run / runfolder.LAST):
        shutil.rmtree(folder, ignore_errors=True)


def shorten_training(train: Train, share: Fraction) -> Train:
    """Return the same training over a share of its length, with warm-up and ramp scaled, evaluated only at its end."""
    values = train.model_dump()
    values["duration"] = scale_length(train.duration, share)
    values["eval"] |= {"every": values["duration"], "at_start": False}
    if isinstance(train.schedule.warmup, str):
        values["schedule"]["warmup"] = scale_length(train.schedule.warmup, share)
    if train.batch_ramp and isinstance(train.batch_ramp.until, str):
        values["batch_ramp"]["until"] = scale_length(train.batch_ramp.until, share)
    values["early_stopping"] = None
    values["checkpoint"] |= {"keep_best": False}
    return Train.model_validate(values)


def scale_length(text: str, share: Fraction) -> str:
    """Scale a duration: `30ep` times 1/4 is `7.5ep`; steps stay whole, at least one."""
    length = parse_duration(text)
    if length.unit == "st":
        return f"{max(1, round(length.value * share))}st"
    return f"{max(0.001, float(length.value * share)):.3f}".rstrip("0").rstrip(".") + length.unit
