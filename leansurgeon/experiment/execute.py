"""One training of an experiment, carried out in a process of its own."""

from __future__ import annotations

from leansurgeon.checkpoints.source import Source, open_source
from leansurgeon.experiment.jobs import Job
from leansurgeon.experiment.kept import part_of
from leansurgeon.measure.data.calibration import from_task
from leansurgeon.progress import silent
from leansurgeon.reading.cache_folder import cache_folder
from leansurgeon.surgery.plan.planning import plan, without_data
from leansurgeon.surgery.shrink import Decided, carry_out, decide
from leansurgeon.training.runs.summary import Summary


def carry_out_job(job: Job) -> Summary:
    """In a process of its own: make the starting model, train it, return the summary."""
    import torch

    from leansurgeon.training.together import train_on

    torch.set_num_threads(job.threads)
    changes = job.experiment.source_config or None
    source = open_source(job.source, config_changes=changes if job.source == job.experiment.source else None)
    carry_out(start_of(job, source), job.start, force=True, check=job.prove)
    return train_on(
        job.processes,
        job.experiment.training(transferred=job.transferred, arm=job.arm),
        job.start,
        job.run,
        seed=job.seed,
        experiment=part_of(job),
        say=silent if job.quiet else None,
        cpu=job.cpu,
        resume="never" if job.anew else "auto",
        replace=True,  # what cannot be continued: a run that came to no checkpoint, or of another recipe
    )


def start_of(job: Job, source: Source) -> Decided:
    """The surgery that gives a job its starting model; a transfer calibrates on the experiment's training data."""
    steps = plan(source, job.wanted, job.seed, job.method, calibrated=job.calibrate)
    data = None
    if steps.exactness == "near" and job.calibrate and source.learned:
        task = job.experiment.task_of(job.arm)
        data = from_task(task.name, task.options, source, cache=cache_folder(), seed=job.seed)
    if data is None and job.calibrate:
        steps = without_data(steps)
    return decide(steps, data)
