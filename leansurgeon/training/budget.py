"""Timed training: estimate the cost of a step, how many samples to evaluate, and when the last step must end.

`train.duration: 20m` is the length of the whole command, with preparation, evaluation, saving and measurements. Two
steps are timed before the first one counts. They change no weight and no order.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import torch

from leansurgeon.checkpoints import whereabouts
from leansurgeon.errors import plural
from leansurgeon.measure.costs.speed import time_work
from leansurgeon.progress import duration_text
from leansurgeon.reading.files import in_home
from leansurgeon.training import data_loader, guards
from leansurgeon.training.state import Run, first_batch

LOOK = 0.02  # of the time, for one evaluation at most
LEAST = 16  # samples of an evaluation, whatever they cost
MEASURES = 0.05  # of the time, for measurements after the last step
DISK = 200e6  # bytes per second to write a model on a slow disk
EXIT = 0.5  # seconds from the last line to the end of the process
ENOUGH = 20.0  # seconds, after which one timed step is enough


def fit(run: Run, began: float | None) -> None:
    """Time two steps of `run`, report what an epoch costs and, for a timed training, reserve time for the end.

    `began` is when the command began, by `time.perf_counter` (None: when the run was made).
    """
    command, began = began is not None, run.clock if began is None else began
    every, (step, evaluated) = run.task.size("eval"), run.group.of_main(time_a_step(run))
    if not run.plan.timed:
        run.say(sentence(run, step))
        show(run, run.train.eval.samples or every, evaluated)
        return
    whole = run.plan.seconds
    affordable = max(LEAST, round(LOOK * whole * run.plan.processes / max(evaluated, 1e-9)))
    samples = run.train.eval.samples or run.history.eval_samples or min(every, affordable)
    run.history.eval_samples = samples
    show(run, samples, evaluated)
    (startup,) = run.group.of_main([time.perf_counter() - began])
    spent = run.history.seconds  # by the runs that this one resumes
    looking = run.task.size("eval") * evaluated
    saved = sum(parameter.nbytes for parameter in run.loaded.model.parameters())  # bytes
    last = looking + 2 * saved / DISK + step / 2 + (EXIT if command else 0.0)
    last += MEASURES * whole if run.recipe.measure else 0.0
    if "test" in run.task.splits and run.train.eval.test:
        models = 2.0  # the best weights, and the first or the last ones
        if judges_source(run):
            ours, theirs = run.loaded.model, run.judged.teacher.teacher.model
            models += sum(p.numel() for p in theirs.parameters()) / sum(p.numel() for p in ours.parameters())
        last += models * run.task.size("test") * evaluated
    run.clock = time.perf_counter()
    seconds = max(spent + step / 2, whole - startup - last)
    if run.history.expected_steps is None:
        looks = 1 + run.train.eval.at_start
        run.history.expected_steps = max(1, round((seconds - looks * looking) / step))
    run.trainer.pace.plan = plan = replace(run.plan, seconds=seconds, expected=run.history.expected_steps)
    run.say(beyond(whole, startup, step, looking + last) or sentence(run, step))
    rate = run.train.optim.lr
    if f"{plan.peak:.2g}" != f"{rate:.2g}":
        run.say(f"Few steps ({plan.expected:,}): the learning rate is {plan.peak:.2g} instead of {rate:g}.")


def judges_start(run: Run) -> bool:
    """Return whether the starting weights are also scored on the test split: on the user's own data, to show what
    training gained.
    """
    return run.task.held_out is not None and run.train.eval.at_start


def judges_source(run: Run) -> bool:
    """Return whether the model that this one was cut from is also scored there: if it is the teacher of logits or
    embeddings.
    """
    teacher, made = run.judged.teacher, run.loaded.surgery
    answers = teacher and (teacher.settings.logits or run.task.head == "features")
    if not (judges_start(run) and answers and made):
        return False
    name = teacher.settings.teacher
    return name == "source" or whereabouts.holding(in_home(name), made.source) is not None


def beyond(whole: float, startup: float, step: float, rest: float) -> str | None:
    """Return a warning if not even one step fits the time beside what comes before and after it, else None."""
    least = startup + step + rest
    if least <= 1.1 * whole:
        return None
    return (
        f"{duration_text(whole)} cannot be kept: starting took {duration_text(startup)}, a step takes {_brief(step)}, "
        f"evaluating and saving {duration_text(rest)}. It will take about {duration_text(least)}."
    )


def show(run: Run, samples: int, evaluated: float | None = None) -> None:
    """Limit evaluation to `samples` samples; report it if that is not all and the seconds per sample are known."""
    every = run.task.size("eval")
    if samples >= every:
        return
    run.task = data_loader.SpreadSamples(run.task, samples)
    if evaluated is not None:
        some, all_of_them = run.task.size("eval"), plural(every, "evaluation sample")
        long = duration_text(every * evaluated)
        run.say(f"{some:,} of {all_of_them} are used, evenly spread: all would take {long} each time.")


def time_a_step(run: Run) -> list[float]:
    """Return the seconds of an optimizer step and of one sample in evaluation, on this process."""
    micro, clocks = run.plan.micro, []
    # A quarter of a micro batch is representative on a CPU, which has less parallelism to fill.
    parts = 4 if run.device.type == "cpu" and micro >= 8 and micro % 8 == 0 else 1

    def step() -> None:
        score = run.trainer.scored(first_batch(run, len(clocks), parts))
        (score.loss_sum / score.loss_count.clamp(min=1)).backward()

    def look() -> None:
        batch = run.task.batch("eval", np.arange(count), seed=0, epoch=0)
        run.judged(data_loader.to_device(batch, run.device))

    with guards.undone(run.trainer):
        # The first is mostly warm-up. Processes that share weights must take equally many.
        while len(clocks) < 2 and (run.plan.processes > 1 or sum(clocks) < ENOUGH):
            clocks.append(time_work(step, run.device))
        count = min(run.train.eval.batch, micro, run.task.size("eval"))
        training = run.judged.training
        run.judged.eval()
        try:
            with torch.no_grad():
                sample = time_work(look, run.device) / count
        finally:
            run.judged.train(training)
        return [parts * min(clocks) * run.plan.accumulation, sample]


def sentence(run: Run, step: float) -> str:
    """Describe what a step of `step` seconds and an epoch cost, and how far the training gets."""
    steps = run.plan.steps_per_epoch
    epoch = steps * step
    told = f"A step takes {_brief(step)}, an epoch of {plural(steps, 'step')} {duration_text(epoch)}"
    if run.plan.timed:
        return f"{told}; in {run.train.duration} there is time for some {run.plan.seconds / epoch:.2g} epochs."
    return f"{told}, all {plural(run.plan.steps, 'step')} {duration_text(run.plan.steps * step)} without evaluation."


def _brief(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
