"""Run trainings in their own processes, several at a time: start them, show progress, and end them all if one fails or
this process ends.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path

from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import Diverged, LeanSurgeonError
from leansurgeon.experiment.jobs import Job, describe_part, get_training
from leansurgeon.measure.data.calibration import from_task
from leansurgeon.progress import Say, on_a_terminal, phase, silent
from leansurgeon.rank import cores
from leansurgeon.reading.cache_folder import cache_folder
from leansurgeon.streams import guard
from leansurgeon.surgery.planning import plan, without_data
from leansurgeon.surgery.shrink import carry_out, decide
from leansurgeon.training.runs import folder as runfolder
from leansurgeon.training.runs.summary import Summary
from leansurgeon.training.schedule import Plan, make_plan

# Imported once by the server process that forks the trainings (CPU only: a process that has used CUDA must not fork).
PRELOAD = [
    "leansurgeon.training.loop",
    "leansurgeon.checkpoints.model",
    "leansurgeon.measure.kappa.blocks",
    "accelerate",
]
TRANSFORMERS = ["transformers.modeling_utils", "transformers.modeling_layers", "transformers.models.auto.modeling_auto"]


def fresh_processes(parallel: int, library: str) -> multiprocessing.context.BaseContext:
    """Return the multiprocessing context: processes start clean, so that memory is measured from there. `library`
    (`Architecture.library`) is loaded before they fork.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // parallel)))
    forks = not has_gpu() and "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(PRELOAD + (["timm"] if library == "timm" else TRANSFORMERS))
    return context


def default_parallel() -> int:
    return 1 if has_gpu() else cores()


def has_gpu() -> bool:
    return any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/kfd"))


def carry_out_job(job: Job) -> Summary:
    """Make the starting model, train it and return the summary. Runs in its own process."""
    import torch

    from leansurgeon.training.together import train_on

    torch.set_num_threads(job.threads)
    if job.experiment.cut_from == "original":  # else it was cut before the trainings
        make_start(job, silent)
    return train_on(
        job.processes,
        get_training(job),
        job.start,
        job.run,
        experiment=describe_part(job),
        say=silent if job.quiet else None,
        cpu=job.cpu,
        resume="never" if job.anew else "auto",
        replace=True,  # what cannot be resumed: a run without a checkpoint, or of another recipe
    )


FITTING, CLOSED = 0.4, 0.4  # shares of a cut's time: for the local fit, and for the passes before it
CLOSED_PASSES = 4  # forward passes over all samples before the local fit, with sums and solutions
LEAST_SAMPLES = 64


def make_start(job: Job, say: Say, seconds: float | None = None, forward: float | None = None) -> None:
    """Cut the model that a job begins with; a transfer calibrates on the experiment's training data. A limit in seconds
    gives part of its time to the local fit, and takes fewer samples if the rest of the cut is too slow on the usual
    number: `forward` is the time of a forward pass of one sample.
    """
    changes = job.experiment.source_config or None
    source = open_source(job.source, config_changes=changes if job.source == job.experiment.source else None)
    calibrate = not job.method.uncalibrated
    method = job.method
    if seconds is not None and method.grows:
        method = replace(method, heal_time=FITTING * seconds)
    steps = plan(source, job.wanted, job.seed, method, calibrated=calibrate)
    data = None
    if steps.exactness == "near" and calibrate and source.learned:
        task = job.experiment.task_of(job.arm)
        open_data = partial(from_task, task.name, task.options, source, cache=cache_folder(), seed=job.seed)
        data = open_data()
        if seconds is not None:
            fewer = int(CLOSED * seconds / (CLOSED_PASSES * forward))
            usual = data.as_record().samples
            if fewer < usual["fit"] + usual["guard"]:
                # A quarter as many guard the fit.
                data = replace(open_data(samples=max(LEAST_SAMPLES, int(fewer / 1.25))), asked=None)
    if data is None and calibrate:
        steps = without_data(steps)
    carry_out(decide(steps, data, say), job.start, force=True, check=job.prove)


TELL_EVERY = 60.0  # seconds between two messages about parallel trainings
LOOK_EVERY = 1.0  # seconds between two updates of the bar
SAVING = 60.0  # seconds that a training has for its last checkpoint
LOGGED = 65_536  # bytes read from the end of a log to find its last line
NAMED = 4  # most trainings to name in a line

Key = tuple[str, int]  # arm and seed


def drive(
    jobs: dict[Key, Job],
    done: dict[Key, Summary | None],
    first: str,
    parallel: int,
    samples: int,
    say: Say,
    library: str,
    title: str = "trainings",
) -> None:
    """Start every job whose original is trained, until all are done; the first failure ends the experiment.

    Keys in `done` need no job. `library` (transformers or timm) is loaded before trainings fork. Parallel trainings
    share one bar on a terminal, or an occasional line elsewhere; a training that runs alone shows its own progress.
    """
    waiting = [key for key in jobs if key not in done]
    context = fresh_processes(parallel * max((jobs[key].processes for key in waiting), default=1), library)
    running: dict[Connection, tuple[Key, multiprocessing.Process]] = {}
    with ExitStack() as ends:
        # Nothing is ever sent through it; it closes when this process ends, for whatever reason.
        alive, life = context.Pipe(duplex=False)
        ends.callback(life.close)
        started = []
        ends.callback(end_all, started)  # an interrupt must not wait for hours of training
        side_by_side = parallel > 1
        look = ends.enter_context(as_a_bar(title, jobs, done, samples)) if side_by_side else None
        every = LOOK_EVERY if look else TELL_EVERY
        tell = time.monotonic() + every
        while waiting or running:
            ready = [k for k in waiting if not jobs[k].transferred or (first, k[1]) in done]
            for key in ready[: parallel - len(running)]:
                answer, end = context.Pipe(duplex=False)
                process = context.Process(target=in_process, args=(end, alive, jobs[key]))
                process.start()
                started.append(process)
                end.close()
                running[answer] = key, process
                waiting.remove(key)
            for answer in wait(list(running), max(0.0, tell - time.monotonic()) if side_by_side else None):
                key, process = running.pop(answer)
                done[key] = made = receive_summary(answer, jobs[key])
                process.join()
                told = "it diverged"
                if made:
                    metric = made.task.format_metric(made.final and made.final.metric)
                    told = f"{made.task.metric_label} {metric}, {made.model.parameters:,} parameters"
                    told += f", {made.seconds:.0f} s"
                say(f"[{len(done)}/{len(jobs)}] {jobs[key].label}: {told}")
            if look:
                look()
            elif side_by_side and running and time.monotonic() >= tell:
                say(f"{len(done)} of {len(jobs)} done, {running_line([jobs[k] for k, _ in running.values()], samples)}")
            tell = time.monotonic() + every if time.monotonic() >= tell else tell


@contextmanager
def as_a_bar(
    title: str, jobs: Mapping[Key, Job | None], done: Mapping[Key, Summary | None], samples: int
) -> Iterator[Callable[[], None] | None]:
    """Show one bar for all trainings that are not done, in steps, with rate and remaining time; yield a function that
    updates it.

    Yields None without a terminal, and for timed trainings, whose number of steps is unknown.
    """
    plans = {key: plan_of(job, samples) for key, job in jobs.items() if job is not None and key not in done}
    if not plans or not on_a_terminal() or any(plan.timed for plan in plans.values()):
        yield None
        return
    counted = 0
    with phase(f"{title}, steps", sum(plan.steps for plan in plans.values()), "steps/s") as advance:

        def look() -> None:
            nonlocal counted
            now = sum(plan.steps if key in done else min(step_of(jobs[key]), plan.steps) for key, plan in plans.items())
            advance(now - counted)
            counted = now

        yield look


def end_all(processes: list[multiprocessing.Process]) -> None:
    """Let every running training save its state and end."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(SAVING)
        if process.is_alive():
            process.kill()


def running_line(jobs: list[Job], samples: int) -> str:
    """Return a line such as `running: original, seed 1 (step 330 of 660); ...`, from the trainings' logs."""
    named = "; ".join(f"{job.label} ({how_far(job, samples)})" for job in jobs[:NAMED])
    return f"running: {named}" + (f"; and {len(jobs) - NAMED} more" if len(jobs) > NAMED else "")


def how_far(job: Job, samples: int) -> str:
    """Return text such as `step 330 of 660`; `starting` for a training without a logged step."""
    step, plan = step_of(job), plan_of(job, samples)
    if not step:
        return "starting"
    return f"step {step}" if plan.timed else f"step {step} of {plan.steps}"


def step_of(job: Job) -> int:
    """Return the last step that a training has logged; 0 before the first."""
    try:
        with (job.run / runfolder.METRICS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOGGED))
            *lines, _ = file.read().split(b"\n")  # the last piece may be incomplete
        step = json.loads(lines[-1])["step"]
    except (OSError, ValueError, LookupError):
        return 0
    return step if isinstance(step, int) else 0


def plan_of(job: Job, samples: int) -> Plan:
    """Return the plan of a training on `samples` training samples."""
    return make_plan(job.experiment.training(transferred=job.transferred).train, samples, 1)


def receive_summary(answer: Connection, job: Job) -> Summary | None:
    """Return the summary that a training sends, or None for a trial that diverged; raise any other error
    that it sends.
    """
    try:
        result = answer.recv()
    except EOFError:
        hint = "Was it killed for memory? Finished arms are kept; run the same command again."
        raise LeanSurgeonError(f"The training of {job.label} was killed.", hint) from None
    if job.trial and isinstance(result, Diverged):
        return None
    if isinstance(result, LeanSurgeonError):
        result.message = f"{job.label}: {result.message}"
        raise result
    if isinstance(result, str):
        raise LeanSurgeonError(f"The training of {job.label} failed.\n{result}")
    return result


def in_process(end: Connection, alive: Connection, job: Job) -> None:
    """Run a training in this process; send the summary, the error for the user, or a traceback.

    Ends when the experiment that started it ends, even if that was killed.
    """
    threading.Thread(target=end_with, args=(alive,), daemon=True).start()
    guard()
    answer: Summary | LeanSurgeonError | str
    try:
        try:
            answer = carry_out_job(job)
        except LeanSurgeonError as error:
            answer = error
        except Exception:
            answer = traceback.format_exc()
        end.send(answer)
    except KeyboardInterrupt:  # even while sending: the parent ends this process after an error
        pass


def end_with(alive: Connection) -> None:
    """Wait until the other end of a pipe is gone, then exit at once."""
    try:
        alive.recv()
    except (EOFError, OSError):
        os._exit(1)
