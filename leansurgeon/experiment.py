"""A whole experiment: the original, lean variants and their controls, over several seeds, each trained by the same
recipe.

    original    the source itself, trained
    lean        cut from the trained original of the same seed (`init: transfer`), or started fresh, then trained;
                it is cut from the weights of the last step, since those of the best were chosen by the evaluation data
    control     the same depth cut with the old heads, its MLP solved so that parameters are as near as can be

Every training runs in a process of its own, so that its peak memory is its own. An arm that an earlier call finished is
taken over, and one that was interrupted goes on from its newest checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from leansurgeon.checkpoints.source import Source, open_source
from leansurgeon.errors import LeanSurgeonError, UsageError
from leansurgeon.shape import Stage
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.plan import count, plan
from leansurgeon.surgery.shrink import Decided
from leansurgeon.surgery.wanted import Wanted, resolve
from leansurgeon.training import runfolder
from leansurgeon.training.plan import make as make_plan
from leansurgeon.training.recipe import Arm, ExperimentRecipe
from leansurgeon.training.recipefile import dump
from leansurgeon.training.signals import raising

# Imported once by the server process that forks the trainings (CPU only; a process that has touched CUDA must not
# fork).
PRELOAD = ["leansurgeon.training.loop", "leansurgeon.checkpoints.model", "leansurgeon.measure.kappa", "accelerate"]

CUT_FROM = runfolder.LAST + ", calibrated"  # in the digest: arms cut in another way are not taken over
TELL_EVERY = 60.0  # seconds between two lines about trainings that run side by side
SAVING = 60.0  # seconds that a training has for its last checkpoint
NAMED = 4  # so many of them are named in it


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

    @property
    def label(self) -> str:
        return f"{self.arm}, seed {self.seed}"

    @property
    def transferred(self) -> bool:
        """Whether it starts from what an earlier training of this experiment has learned."""
        return self.source != self.experiment.source and self.wanted.init == "transfer"


def run(
    recipe: ExperimentRecipe,
    workspace: Path,
    *,
    parallel: int | None = None,
    force: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> list[dict]:
    """Run every arm at every seed; returns the summaries in the order of the recipe's arms, then seeds.

    `parallel` trainings run side by side (default: one per CPU core without a GPU, one with). Raises what a training
    raises.
    """
    source = open_source(recipe.source, config_changes=recipe.source_config or None, weights=False)
    first = base_arm(recipe)
    wanted = wanted_shapes(recipe, source)
    parallel = parallel or default_parallel()
    jobs = make_jobs(recipe, workspace, wanted, first, parallel, force=force)
    say(
        f"{recipe.name}: {len(recipe.arms)} arms x {len(recipe.seeds)} seeds = {len(jobs)} trainings, "
        f"{parallel} at a time"
    )
    samples = prepare_data(recipe, say)
    done = {key: old for key, job in jobs.items() if (old := None if force else finished(job))}
    if done:
        say(f"{len(done)} of them were finished by an earlier call and are taken over (--force runs them again)")
    with raising("Stopped by a signal. Finished arms are kept, those under way are saved; run the same command again."):
        drive(jobs, done, first, parallel, samples, say)
    return [done[name, seed] for name in recipe.arms for seed in recipe.seeds]


def base_arm(recipe: ExperimentRecipe) -> str:
    """The arm that is the source itself. Transfer needs it, since lean arms are cut from what it has learned."""
    plain = [name for name, arm in recipe.arms.items() if not arm.changes_shape and arm.control_of is None]
    if not plain:
        raise UsageError(
            f"The experiment '{recipe.name}' has no arm for the original.", "Add `original: {}` to its arms."
        )
    return plain[0]


def wanted_shapes(recipe: ExperimentRecipe, source: Source) -> dict[str, Wanted]:
    """What every arm wants, in the recipe's order. An impossible one is refused before anything runs, and named;
    controls are looked at last, since they depend on the arm that they control.
    """
    found = {}
    for name in sorted(recipe.arms, key=lambda name: recipe.arms[name].control_of is not None):
        try:
            found[name] = wanted_of(name, recipe, source)
            method, calibrate = method_of(name, recipe)
            plan(source, found[name], 0, method, calibrated=calibrate)
        except LeanSurgeonError as error:
            error.message = f"Arm '{name}': {error.message}"
            raise
    return {name: found[name] for name in recipe.arms}


def wanted_of(name: str, recipe: ExperimentRecipe, source: Source) -> Wanted:
    """The wanted shape of an arm; a control's MLP is solved for the parameters of the arm that it controls."""
    arm = recipe.arms[name]
    if arm.control_of is None:
        return typed(arm)
    lean_arm = recipe.arms[arm.control_of]
    lean = typed(lean_arm)
    target = resolve(source, lean)
    parameters = count(source, target.architecture, target.shape).total
    narrow = replace(lean, heads=None, head_dim="keep", mlp_dim=None, mlp_ratio=None, init=arm.init or lean.init)
    return replace(narrow, mlp_dim=",".join(str(m) for m in equal_mlp(source, narrow, parameters)))


def typed(arm: Arm) -> Wanted:
    def text(value: object) -> str | None:
        return None if value is None else str(value)

    return Wanted(
        heads=text(arm.heads),
        layers=text(arm.layers),
        head_dim=text(arm.head_dim) or "auto",
        mlp_dim=text(arm.mlp_dim),
        mlp_ratio=arm.mlp_ratio,
        init=arm.init or "transfer",
    )


def equal_mlp(source: Source, wanted: Wanted, parameters: int) -> list[int]:
    """MLP widths (scaled alike in every stage) whose parameter count is nearest to `parameters`; the count is linear
    in them.
    """
    target = resolve(source, wanted)

    def at(scale: float) -> tuple[list[Stage], int]:
        stages = [replace(s, mlp_dim=max(1, round(s.mlp_dim * scale))) for s in target.shape.stages]
        shape = replace(target.shape, stages=tuple(stages))
        return stages, count(source, target.architecture, shape).total

    low, high = at(1.0)[1], at(2.0)[1]
    scale = 1.0 + (parameters - low) / (high - low)
    if scale <= 0:
        raise UsageError(
            "The control cannot reach the lean model's parameters even without an MLP.", "Leave the control out."
        )
    return [s.mlp_dim for s in at(scale)[0]]


def make_jobs(
    recipe: ExperimentRecipe,
    workspace: Path,
    wanted: dict[str, Wanted],
    first: str,
    parallel: int,
    *,
    force: bool = False,
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
    return hashlib.sha256((dump(only) + repr(wanted) + repr(method_of(arm, recipe)) + CUT_FROM).encode()).hexdigest()[
        :16
    ]


def finished(job: Job) -> dict | None:
    try:
        summary = json.loads((job.run / "summary.json").read_text())
    except (OSError, ValueError):
        return None
    same = (summary.get("experiment") or {}).get("digest") == job.digest
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


def drive(
    jobs: dict[tuple[str, int], Job],
    done: dict[tuple[str, int], dict],
    first: str,
    parallel: int,
    samples: int,
    say: Callable[[str], None],
) -> None:
    """Start every job whose original is trained, until all are done; the first failure ends the experiment."""
    context = fresh_processes(parallel)
    waiting = [key for key in jobs if key not in done]
    running: dict[Connection, tuple[tuple[str, int], multiprocessing.Process]] = {}
    with ExitStack() as ends:
        alive, life = context.Pipe(
            duplex=False
        )  # nothing is ever sent; it closes when this process ends, however it ends
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
    return f"step {step} of {make_plan(training.train, samples, 1).steps}"


def received(answer: Connection, job: Job) -> dict:
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
    try:
        end.send(carry_out_job(job))
    except LeanSurgeonError as error:
        end.send(error)
    except KeyboardInterrupt:
        pass
    except Exception:
        end.send(traceback.format_exc())


def result_line(summary: dict) -> str:
    task, final = summary["task"], summary["final"]
    value = f"{100 * final['metric']:.1f} %" if task["percent"] else f"{final['metric']:.3f}"
    parameters = f"{summary['model']['parameters']:,} parameters"
    return f"{task['metric_label']} {value}, {parameters}, {summary['seconds']:.0f} s"


def carry_out_job(job: Job) -> dict:
    """In a process of its own: make the starting model, train it, return the summary."""
    import torch

    from leansurgeon.surgery.shrink import carry_out
    from leansurgeon.training.loop import train

    torch.set_num_threads(job.threads)
    changes = job.experiment.source_config or None
    source = open_source(job.source, config_changes=changes if job.source == job.experiment.source else None)
    carry_out(start_of(job, source), source, job.start, force=True, check=job.prove)
    return train(
        job.experiment.training(transferred=job.transferred, arm=job.arm),
        job.start,
        job.run,
        seed=job.seed,
        experiment={"name": job.experiment.name, "arm": job.arm, "seed": job.seed, "digest": job.digest}
        | {"control_of": job.experiment.arms[job.arm].control_of, "init": "transfer" if job.transferred else "fresh"}
        | {"own_task": ", ".join(f"{key} {value}" for key, value in job.experiment.own_task(job.arm).items())},
        say=(lambda _: None) if job.quiet else None,
        resume="never" if job.anew else "auto",
        replace=True,  # what cannot be continued: a run that came to no checkpoint, or of another recipe
    )


def start_of(job: Job, source: Source) -> Decided:
    """The surgery that gives a job its starting model; a transfer calibrates on the experiment's training data."""
    from leansurgeon.surgery.shrink import decide

    near = plan(source, job.wanted, job.seed, job.method, calibrated=job.calibrate).exactness == "near"
    data = None
    if near and job.calibrate and source.learned:
        from leansurgeon.measure.calibration import from_task

        task = job.experiment.task_of(job.arm)
        data = from_task(task.name, task.options, source, cache=runfolder.cache_dir(), seed=job.seed)
    return decide(source, job.wanted, job.seed, job.method, data)


def method_of(name: str, recipe: ExperimentRecipe) -> tuple[Method, bool]:
    """How an arm is cut, and whether on sample data; a control is cut as the arm that it controls unless it says
    otherwise.
    """
    arm = recipe.arms[name]
    other = recipe.arms[arm.control_of] if arm.control_of else arm

    def of(key: str, default: Any) -> Any:
        return next((v for a in (arm, other) if (v := getattr(a, key)) is not None), default)

    calibrate = of("calibrate", True)
    method = Method(
        layers=of("method", "auto"),
        more=of("more_heads", "add"),
        heal=of("heal", True),
        fit=of("fit", 0),
        uncalibrated=not calibrate,
    )
    method.check(calibrate)
    return method, calibrate


def end_with(alive: Connection) -> None:
    """Wait until the other side of a pipe is gone, then end this process at once."""
    try:
        alive.recv()
    except (EOFError, OSError):
        os._exit(1)


def fresh_processes(parallel: int) -> multiprocessing.context.BaseContext:
    """How processes start: each from a clean state, so memory is measured from there."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // parallel)))
    forks = not has_gpu() and "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(PRELOAD)
    return context


def default_parallel() -> int:
    return 1 if has_gpu() else cores()


def has_gpu() -> bool:
    return any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/kfd"))


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
