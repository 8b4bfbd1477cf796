"""Trainings in processes of their own, several at a time: start them, say how far they are, and end them all when one
fails or this process ends.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait

from leansurgeon.errors import LeanSurgeonError
from leansurgeon.experiment.execute import carry_out_job
from leansurgeon.experiment.jobs import Job
from leansurgeon.experiment.machine import fresh_processes
from leansurgeon.streams import guard
from leansurgeon.training.plan import make as make_plan
from leansurgeon.training.runs import folder as runfolder
from leansurgeon.training.runs.summary import Summary

TELL_EVERY = 60.0  # seconds between two lines about trainings that run side by side
SAVING = 60.0  # seconds that a training has for its last checkpoint
NAMED = 4  # so many trainings are named in a line


def drive(
    jobs: dict[tuple[str, int], Job],
    done: dict[tuple[str, int], Summary | None],
    first: str,
    parallel: int,
    samples: int,
    say: Callable[[str], None],
    library: str,
) -> None:
    """Start every job whose original is trained, until all are done; the first failure ends the experiment. What is
    `done` already may have no job. `library` (transformers or timm) is loaded before trainings fork.
    """
    waiting = [key for key in jobs if key not in done]
    context = fresh_processes(parallel * max((jobs[key].processes for key in waiting), default=1), library)
    running: dict[Connection, tuple[tuple[str, int], multiprocessing.Process]] = {}
    with ExitStack() as ends:
        # Nothing is ever sent through it; it closes when this process ends, however it ends.
        alive, life = context.Pipe(duplex=False)
        ends.callback(life.close)
        started: list[multiprocessing.Process] = []
        ends.callback(end_all, started)  # an interrupt must not wait for hours of training
        tell = time.monotonic() + TELL_EVERY
        while waiting or running:
            ready = [k for k in waiting if k[0] == first or jobs[k].wanted.init == "fresh" or (first, k[1]) in done]
            for key in ready[: parallel - len(running)]:
                answer, end = context.Pipe(duplex=False)
                process = context.Process(target=in_process, args=(end, alive, jobs[key]))
                process.start()
                started.append(process)
                end.close()
                running[answer] = key, process
                waiting.remove(key)
            side_by_side = parallel > 1  # a training that runs alone speaks for itself
            for answer in wait(list(running), max(0.0, tell - time.monotonic()) if side_by_side else None):
                key, process = running.pop(answer)
                done[key] = received(answer, jobs[key])
                process.join()
                say(f"[{len(done)}/{len(jobs)}] {jobs[key].label}: {result_line(done[key])}")
            if side_by_side and running and time.monotonic() >= tell:
                say(f"{len(done)} of {len(jobs)} done, {running_line([jobs[k] for k, _ in running.values()], samples)}")
                tell = time.monotonic() + TELL_EVERY


def end_all(processes: list[multiprocessing.Process]) -> None:
    """Let every training that still runs save what it has, and end."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(SAVING)
        if process.is_alive():
            process.kill()


def running_line(jobs: list[Job], samples: int) -> str:
    """`running: original, seed 1 (step 330 of 660); ...`, from what the trainings have logged."""
    named = "; ".join(f"{job.label} ({how_far(job, samples)})" for job in jobs[:NAMED])
    return f"running: {named}" + (f"; and {len(jobs) - NAMED} more" if len(jobs) > NAMED else "")


def how_far(job: Job, samples: int) -> str:
    """`step 330 of 660`; a training that has logged no step yet is `starting`."""
    try:
        *lines, _ = (job.run / runfolder.METRICS).read_text().split("\n")  # the last piece may still be written
        step = json.loads(lines[-1])["step"]
    except (OSError, ValueError, LookupError):
        return "starting"
    training = job.experiment.training(transferred=job.transferred)
    plan = make_plan(training.train, samples, 1)
    return f"step {step}" if plan.timed else f"step {step} of {plan.steps}"


def result_line(summary: Summary) -> str:
    task, final = summary.task, summary.final
    parameters = f"{summary.model.parameters:,} parameters"
    return f"{task.metric_label} {task.shown(final and final.metric)}, {parameters}, {summary.seconds:.0f} s"


def received(answer: Connection, job: Job) -> Summary:
    """The summary that a training sends; its error is raised here."""
    try:
        result = answer.recv()
    except EOFError:
        hint = "Was it killed for memory? Finished arms are kept; run the same command again."
        raise LeanSurgeonError(f"The training of {job.label} was killed.", hint) from None
    if isinstance(result, LeanSurgeonError):
        result.message = f"{job.label}: {result.message}"
        raise result
    if isinstance(result, str):
        raise LeanSurgeonError(f"The training of {job.label} failed.\n{result}")
    return result


def in_process(end: Connection, alive: Connection, job: Job) -> None:
    """Body of a training's process: sends the summary, or the error that a user should read, or a traceback.

    It ends with the experiment that started it, also where that was killed.
    """
    threading.Thread(target=end_with, args=(alive,), daemon=True).start()
    guard()
    try:
        end.send(carry_out_job(job))
    except LeanSurgeonError as error:
        end.send(error)
    except KeyboardInterrupt:
        pass
    except Exception:
        end.send(traceback.format_exc())


def end_with(alive: Connection) -> None:
    """Wait until the other side of a pipe is gone, then end this process at once."""
    try:
        alive.recv()
    except (EOFError, OSError):
        os._exit(1)
