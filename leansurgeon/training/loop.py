"""The training loop: take a recipe, a model folder and a run folder, train, and return the summary.

    setup     device, data, model, plan, optimizer, fresh or restored from a checkpoint (setup.py, state.py)
    train     evaluate -> (step ... step, log)* -> evaluate -> keep the best -> save -> ...
    finish    last model, kappa, summary (finish.py)

These rules hold everywhere: a step depends only on (recipe, seed, step); the host synchronizes with the device only at
log points; all processes make the same decisions; every file is written to a temporary name and renamed.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from leansurgeon.checkpoints.kind import LANGUAGE
from leansurgeon.errors import Diverged, Interrupted, LeanSurgeonError, Stopped
from leansurgeon.progress import Say
from leansurgeon.rank import rank
from leansurgeon.training import budget, data_loader, evaluator, guards, measures, setup, state
from leansurgeon.training.finish import finish
from leansurgeon.training.observe import Progress
from leansurgeon.training.processes import signals
from leansurgeon.training.processes.agree import explain_lost_processes
from leansurgeon.training.recipe.durations import parse_duration
from leansurgeon.training.recipe.schema import TrainingRecipe
from leansurgeon.training.runs import checkpoint
from leansurgeon.training.runs import folder as runfolder
from leansurgeon.training.runs.summary import Part, Summary
from leansurgeon.training.state import Run


def train(
    recipe: TrainingRecipe,
    model_dir: Path,
    run_dir: Path,
    *,
    experiment: Part | None = None,
    say: Say | None = None,
    began: float | None = None,
    **options: Any,
) -> Summary:
    """Train the model in `model_dir` with `recipe`, write a run to `run_dir` and return its summary.

    `experiment` is copied into the summary. `say` receives the messages (default: a progress line on stderr). `began`
    is when the command began, by `time.perf_counter`; a duration in wall time counts from there. `options` go to
    `setup.ready`.

    Raises `Diverged`, `OutOfMemory` or `UsageError`; after a signal, `Stopped` or `Interrupted` once everything is
    saved.
    """
    progress = Progress(say, quiet=rank() > 0)
    run = setup.ready(recipe, model_dir, run_dir, progress, **options)
    run.history.started = run.history.started or datetime.now(UTC).isoformat(timespec="seconds")
    try:
        heard = signals.handle_signals(signals.HEARD, run.stops.heard)
        with heard, guards.memory_explained(run.device, *_smaller(run)):
            if run.plan.timed or began is not None:
                budget.fit(run, began)
            elif run.train.eval.samples:  # one of the trainings of an experiment
                budget.show(run, run.train.eval.samples)
            _train(run)
            return finish(run, experiment)
    except RuntimeError as error:
        told = explain_lost_processes(error)
        if "DataLoader worker" in str(error):  # torch raises this wherever the main thread is at that moment
            told = LeanSurgeonError(
                "A data worker process was killed; memory or /dev/shm may have run short.",
                "Fewer train.workers or a smaller train.micro_batch need less; --resume auto continues from the last "
                "save.",
            )
        if told is None:
            raise
        raise told from error
    finally:
        progress.clear()
        run.trackers.close()
        runfolder.release(run.lock)


def _smaller(run: Run) -> tuple[str, str]:
    """Return what a step was too large for, and a hint on what to do."""
    micro = run.plan.micro
    if micro == 1:
        return "for a micro batch of 1", guards.LESS
    less = max((size for size in range(1, micro // 2 + 1) if micro % size == 0), default=1)
    hint = f"Try --set train.micro_batch={less}: the global batch of {run.plan.batch} stays the same."
    return f"for a micro batch of {micro}", hint


def _train(run: Run) -> None:
    """Run all steps, with rollbacks if the recipe wants them. A request to stop ends in a checkpoint and an error."""
    try:
        if not run.history.resumed:
            measures.measure(run, [wanted for wanted in measures.list_wanted(run) if wanted.every], {})
            run.history.evaluate = run.train.eval.at_start
            if run.train.nan == "rollback":
                state.save(run)  # a rollback needs a checkpoint to return to
        while True:
            try:
                if run.history.evaluate:
                    evaluator.evaluate_and_keep(run)
                batches = data_loader.train_batches(
                    run.task, run.plan, rank=run.group.rank, device=run.device, start=run.history.done
                )
                with closing(batches):
                    return _steps(run, batches)
            except guards.RollBack as back:
                # The step that failed is skipped the next time.
                given_up, rollbacks = [*run.history.given_up, back.step], run.history.rollbacks + 1
                newest = run.group.share(lambda: checkpoint.newest(run.folder, run.say))
                if rollbacks > guards.MOST_ROLLBACKS or newest is None:
                    last = f"It was the last of {guards.MOST_ROLLBACKS} rollbacks."
                    why = last if newest else f"There is no complete checkpoint in {run.folder} to go back to."
                    raise Diverged(f"{back.sentence} {why}", "Lower train.optim.lr.") from None
                state.restore(run, newest)
                run.history.given_up, run.history.rollbacks = given_up, rollbacks
                run.say(f"{back.sentence} Back to step {run.history.done}; step {back.step + 1} will be skipped.")
    except signals.StopRequested as request:
        run.progress.clear()
        done, steps = run.history.done, "" if run.plan.timed else f" of {run.plan.steps}"
        if not guards.sound(run):
            raise Diverged(f"A loss or gradient up to step {done} is not finite; nothing was saved.") from None
        state.save(run)
        interrupted = request.kind == signals.INTERRUPT
        kind, word = (Interrupted, "Interrupted") if interrupted else (Stopped, "Stopped by a signal")
        raise kind(
            f"{word} after step {done}{steps}; everything is saved in {run.folder}.",
            f"Resume with the same command and --resume {run.folder}",
        ) from None


def _steps(run: Run, batches: Iterator[list[data_loader.Batch]]) -> None:
    """Train from the current step to the end: step, log, measure, evaluate, save, stop."""
    history, pace, train = run.history, run.trainer.pace, run.train
    if run.plan.timed and history.done == 0:  # time before the first step does not count as step time
        pace.look(0, run.group.of_main([run.seconds_spent()])[0])
    run.memory.resume()
    run.window.begin()
    for step in itertools.count(history.done):
        if pace.over(step) or history.early:
            break
        with run.window.waiting():
            micro_batches = next(batches)
        if run.task.head in LANGUAGE:
            run.tokens_per_sample = micro_batches[0]["input_ids"].shape[1]
        left_out = step in history.given_up  # a rollback gave this step up: its values were not finite
        run.window.add(torch.zeros(3, device=run.device) if left_out else run.trainer.step(step, micro_batches))
        history.done = step + 1
        # What is due follows from the recipe and the step, or from rank 0's clock, read at a log point: every process
        # decides alike.
        save, wanted = run.plan.due(train.checkpoint.every, history.done), measures.list_due(run, history.done)
        evaluate = run.plan.evaluate_after(history.done)
        look = evaluate or history.done % train.log_every == 0 or pace.over(history.done)
        # A timed training does not know yet how long a step takes; until then it stays at the start of its schedule.
        look = look or (run.plan.timed and history.done < train.log_every and history.done.bit_count() == 1)
        # Logging raises then, so nothing is saved or measured with non-finite values.
        if look or ((save or wanted) and not guards.sound(run)):
            evaluate_now, save_now = _log_losses(run)
            evaluate, save = evaluate or evaluate_now, save or save_now
        if pace.over(history.done):  # evaluate now; `finish` does whatever else is due
            wanted, evaluate, save = [], True, False
        if wanted or evaluate or save:
            with run.window.leave_out(), run.memory.leave_out():
                # Before the evaluation, which a signal may stop: a resumed run then has this row.
                measures.measure(run, wanted, {})
                if evaluate:
                    history.evaluate = True
                    evaluator.evaluate_and_keep(run)
                if save:
                    evaluator.save_checkpoint(run)
        if history.done % run.stops.every == 0:
            run.stops.raise_if_asked()
    run.memory.read()


def _log_losses(run: Run) -> tuple[bool, bool]:
    """Read, check, write and show the losses since the last log point, and set the pace of a timed training; return
    whether rank 0's clock asks for an evaluation and for a checkpoint. All processes must call this.
    """
    history, done = run.history, run.history.done
    rows, steps, seconds, waited = run.window.look()
    history.windows.append([steps, seconds])
    history.waited += waited
    skipped = guards.check_finite(run, rows)
    history.given_up += skipped
    fine = [row for row in rows if math.isfinite(row[0])]
    loss = sum(row[0] for row in fine) / max(1.0, sum(row[1] for row in fine))
    lr, norm = run.trainer.lr(done - 1), rows[-1][2]
    row = {"loss": loss, "lr": lr, "grad_norm": norm if math.isfinite(norm) else None}
    if skipped:
        run.say(f"{len(skipped)} step(s) up to {done} skipped: a loss or gradient was not finite.")
    step_seconds, waiting = seconds / steps, waited / max(seconds, 1e-9)
    more = {"skipped": len(skipped)} if skipped else {}
    more |= {"step_ms": round(1000 * step_seconds, 3), "data_wait": round(waiting, 4)}
    epoch = round(run.plan.position(done) / run.plan.epoch_samples, 4)
    run.note(type="train", step=done, epoch=epoch, **row, **more)
    rate, unit = state.get_rate(run, steps, seconds)
    run.trackers.log(row | {unit: rate}, done)
    train, now = run.train, time.perf_counter()
    evaluation, saving = (
        parse_duration(text).seconds or math.inf for text in (train.eval.every, train.checkpoint.every)
    )
    evaluate, save = now - run.evaluated_at >= evaluation, now - run.saved_at >= saving
    evaluate, save, spent, step_seconds = run.group.of_main([evaluate, save, run.seconds_spent(), step_seconds])
    if run.group.processes > 1:
        run.stops.every = max(1, int(1 / max(step_seconds, 1e-6)))
    if run.plan.timed:
        run.trainer.pace.look(done, spent)
    run.progress.step(
        done,
        loss=loss,
        lr=lr,
        rate=rate,
        unit=unit,
        eta=state.get_eta(run),
        waiting=waiting,
        memory=run.memory.read(),
        fraction=run.trainer.pace.fraction(done),
    )
    return bool(evaluate), bool(save)
