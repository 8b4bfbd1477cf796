"""The training loop: a recipe, a model folder, a run folder; back comes the summary.

    setup     device, data, model, plan, optimizer; or all of them as a checkpoint left them (setup.py, state.py)
    train     evaluate -> (step ... step, log)* -> evaluate -> keep the best -> save -> ...
    finish    last model, kappa, summary (summary.py)

Rules that hold everywhere: what happens at a step is a function of (recipe, seed, step); the host waits for the device
only at log points; processes decide alike; every file is written aside and renamed.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from leansurgeon import tasks
from leansurgeon.errors import Diverged, LeanSurgeonError, OutOfMemory
from leansurgeon.training import budget, setup, starting, state
from leansurgeon.training.data import feed
from leansurgeon.training.evaluate import Evaluation, evaluate
from leansurgeon.training.finish import eta, finish, rate, tokens_in
from leansurgeon.training.processes import engine, launch, signals
from leansurgeon.training.processes.agree import lost_others
from leansurgeon.training.recipe.durations import parse_duration
from leansurgeon.training.recipe.schema import TrainingRecipe
from leansurgeon.training.runs import checkpoint
from leansurgeon.training.runs import folder as runfolder
from leansurgeon.training.runs.summary import Part, Summary
from leansurgeon.training.setup import prepared_task
from leansurgeon.training.state import Run
from leansurgeon.training.watch import guards, measures
from leansurgeon.training.watch.progress import Progress

__all__ = ["prepared_task", "train"]


def train(
    recipe: TrainingRecipe,
    model_dir: Path,
    run_dir: Path,
    *,
    seed: int | None = None,
    experiment: Part | None = None,
    say: Callable[[str], None] | None = None,
    loaded: Any = None,
    task: tasks.Task | None = None,
    cpu: bool = False,
    replace: bool = False,
    resume: str = "never",
    resume_anyway: bool = False,
    limit_batches: int | None = None,
    began: float | None = None,
) -> Summary:
    """Train the model in `model_dir` by `recipe` and leave a run in `run_dir`. Returns its summary.

    `seed` takes the place of the recipe's; `experiment` is copied into the summary; `say` takes the lines of talk
    (default: a progress line on stderr); `loaded` and `task` (prepared) may be given instead of being opened; `cpu`
    leaves a GPU alone; `replace` gives up a run that stands in `run_dir`; `resume` ("never", "auto" or the path of a
    checkpoint) and `resume_anyway` as in `resume.point`; `limit_batches` cuts every epoch and evaluation short; `began`
    is when the command began, by `time.perf_counter`, from which a length by the clock counts.

    Raises `Diverged`, `OutOfMemory`, `UsageError`, and after a signal `Stopped` or `Interrupted`, when all is saved.
    """
    seed = recipe.train.seed if seed is None else seed
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": seed})})
    progress = Progress(0, say, quiet=launch.rank() > 0)
    run = setup.ready(
        recipe,
        Path(model_dir),
        Path(run_dir),
        progress,
        loaded=loaded,
        task=task,
        cpu=cpu,
        replace=replace,
        resume_from=str(resume),
        resume_anyway=resume_anyway,
        limit_batches=limit_batches,
    )
    run.history.started = run.history.started or datetime.now(UTC).isoformat(timespec="seconds")
    try:
        with signals.listening(run.stops):
            if run.plan.timed or began is not None:
                budget.fit(run, began)
            _train(run)
            return finish(run, _save, experiment)
    except KeyboardInterrupt:
        best = run.history.best
        kept = f"the best model so far (step {best.step}) is in {run.folder / runfolder.BEST}" if best else ""
        progress.say(f"Interrupted; {kept or 'no model was saved yet'}.")
        raise
    except torch.OutOfMemoryError as error:
        micro = run.plan.micro
        raise OutOfMemory(
            f"{engine.device_name(run.trainer.accelerator)} has too little memory for a micro batch of {micro}.",
            f"Try --set train.micro_batch={max(1, micro // 2)}: the global batch of {run.plan.batch} stays the same.",
        ) from error
    except RuntimeError as error:
        told = feed.dead_worker(error) or lost_others(error)
        if told is None:
            raise
        raise told from error
    finally:
        progress.clear()
        run.trackers.close()
        runfolder.release(run.lock)


def _train(run: Run) -> None:
    """All steps, rolled back where the recipe wants it; a wish to stop ends in a checkpoint and an error."""
    try:
        if not run.history.resumed:
            measures.at_start(run)
            run.history.evaluate = run.recipe.train.eval.at_start
            if run.recipe.train.nan == "rollback":
                state.save(run)  # there must be something to go back to
        while True:
            try:
                _steps(run)
                return
            except guards.RollBack as back:
                _roll_back(run, back)
    except signals.Wish as wish:
        run.progress.clear()
        raise _stopped(run, wish) from None


def _steps(run: Run) -> None:
    """Steps from where the training stands to its end, with everything that comes between them."""
    trainer = run.trainer
    if run.history.evaluate:
        _evaluate(run)
    batches = feed.train_batches(
        run.task,
        run.plan,
        seed=trainer.seed,
        rank=trainer.accelerator.process_index,
        device=trainer.accelerator.device,
        start=run.history.done,
        workers=run.recipe.train.workers,
    )
    with closing(batches):
        _steps_of(run, batches)


def _steps_of(run: Run, batches: Iterator[list[feed.Batch]]) -> None:
    trainer, history = run.trainer, run.history
    if run.plan.timed and history.done == 0:  # what went before the first step is no part of a step's time
        trainer.pace.look(0, run.council.of_main([run.spent()])[0])
    run.memory.resume()
    clock, waited, taken = time.perf_counter(), 0.0, 0  # rows that a checkpoint brought are not counted in `taken`
    for step in itertools.count(history.done):
        if trainer.pace.over(step) or history.early:
            break
        before = time.perf_counter()
        micro_batches = next(batches)
        waited += time.perf_counter() - before
        run.tokens_per_sample = tokens_in(run.task, micro_batches[0])
        given_up = step in history.given_up
        run.window.append(
            torch.zeros(3, device=trainer.accelerator.device) if given_up else trainer.step(step, micro_batches)
        )
        history.done = done = step + 1
        taken += 1
        due = run.plan.evaluate_after(done)
        look = due or done % run.recipe.train.log_every == 0 or trainer.pace.over(done)
        # A timed training does not know how long a step takes, and stays at the start of its schedule until it does.
        look = look or (run.plan.timed and done < run.recipe.train.log_every and done.bit_count() == 1)
        save = run.plan.due(run.recipe.train.checkpoint.every, done)
        measured = measures.due(run, done)
        # A look raises then; nothing spoilt is saved or measured.
        look = look or ((save or measured) and not guards.sound(run.window, trainer))
        if look:
            rows = torch.stack(run.window).tolist()  # the one place where the host waits for the device
            now = time.perf_counter()
            history.windows.append([taken, now - clock])
            history.waited += waited
            by_clock = _log(run, rows, waited / max(now - clock, 1e-9))
            due, save = due or by_clock[0], save or by_clock[1]
            run.window, clock, waited, taken = [], now, 0.0, 0
        paused = time.perf_counter()
        measured = measured and not trainer.pace.over(done)
        if measured:  # before the evaluation, which may be stopped by a signal: what is resumed has this row
            run.memory.pause()
            measures.at_step(run)
            run.memory.resume()
        if due or trainer.pace.over(done):
            run.memory.pause()
            history.evaluate = True
            _evaluate(run)
            run.memory.resume()
        if save and not trainer.pace.over(done):
            _save_checkpoint(run)
        if run.stops.after_step(done):
            run.stops.raise_if_asked()
        if due or save or measured:
            clock += time.perf_counter() - paused  # not reset: a save may come between two looks
    run.memory.pause()


def _log(run: Run, rows: list[list[float]], waiting: float) -> tuple[bool, bool]:
    """Check, write and show the steps since the last look: rows of loss sum, count and gradient norm.

    Returns whether the clock asks for an evaluation and for a checkpoint, as rank 0 reads it for all.
    """
    history, done = run.history, run.history.done
    skipped = guards.check_finite(rows, done - len(rows), run.trainer, history.given_up)
    history.given_up += skipped
    fine = [row for row in rows if math.isfinite(row[0])]
    loss = sum(row[0] for row in fine) / max(1.0, sum(row[1] for row in fine))
    steps, seconds = history.windows[-1]
    lr, norm = run.trainer.lr(done - 1), rows[-1][2]
    speed, unit = rate(run, done, int(steps), seconds)
    mfu = None
    if run.peak_flops and run.flops_per_sample:
        per_second = speed / run.tokens_per_sample * run.flops_per_sample
        mfu = per_second / run.peak_flops / run.plan.processes
    record = {
        "step": done,
        "epoch": round(run.plan.position(done) / run.plan.epoch_samples, 4),
        "loss": loss,
        "lr": lr,
        "grad_norm": norm if math.isfinite(norm) else None,
    }
    if skipped:
        record["skipped"] = len(skipped)
        run.progress.say(f"{len(skipped)} step(s) up to {done} left out: not every number was finite.")
    timing = {"step_ms": round(1000 * seconds / steps, 3), "data_wait": round(waiting, 4)}
    run.log.write(type="train", **record, **timing)
    run.trackers.log({"loss": loss, "lr": lr, "grad_norm": record["grad_norm"], unit: speed}, done)
    due = _by_clock(run, done, seconds / steps)
    run.progress.step(
        done,
        loss=loss,
        lr=lr,
        rate=speed,
        unit=unit,
        eta=eta(run, done),
        mfu=mfu,
        waiting=waiting,
        memory=run.memory.now(),
        fraction=run.trainer.pace.fraction(done),
    )
    return due


def _by_clock(run: Run, done: int, step_seconds: float) -> tuple[bool, bool]:
    """Whether evaluation and checkpoint are due by the clock of rank 0; the pace of a timed training, too."""
    train, now = run.recipe.train, time.perf_counter()
    evaluation, saving = (parse_duration(text).seconds for text in (train.eval.every, train.checkpoint.every))
    run.stops.pace(step_seconds)
    if evaluation is None and saving is None and not run.plan.timed:
        return False, False
    due = evaluation is not None and now - run.evaluated_at >= evaluation
    save = saving is not None and now - run.saved_at >= saving
    due, save, spent = run.council.of_main([float(due), float(save), run.spent()])
    if run.plan.timed:
        run.trainer.pace.look(done, spent)
    return bool(due), bool(save)


def _evaluate(run: Run) -> Evaluation:
    """Evaluate at the present step, write it down, and keep the model if it is the best of those that were trained."""
    clock, history, metric = time.perf_counter(), run.history, run.task.metric
    done = history.done
    engine.average_statistics(run.judged, run.trainer.accelerator)
    try:
        result = evaluate(
            run.judged,
            run.task,
            run.trainer.accelerator,
            batch=run.recipe.train.eval.batch,
            check=run.stops.raise_if_asked,
            workers=run.recipe.train.workers,
        )
    except Diverged as error:
        if done and run.recipe.train.nan == "rollback":
            raise guards.RollBack(done - 1, error.message) from None
        raise
    told = result.scores()
    if done:
        history.last = told
        history.eval_losses.append(result.loss)
        if _better(run, result):
            if run.recipe.train.checkpoint.keep_best:
                _save(run, runfolder.BEST)
            history.best, history.stale = result.scores(done), False
        history.eval_seconds.append(time.perf_counter() - clock)
        patience = run.recipe.train.early_stopping
        if patience and history.worse >= patience.patience:
            history.early = True
            run.progress.say(f"No better for {history.worse} evaluations: the training ends after step {done}.")
    else:
        history.before = told
    run.log.write(type="eval", step=done, **told.as_dict(), metric_key=metric.key, samples=result.samples)
    run.trackers.log({f"eval/{key}": value for key, value in result.metrics.items()} | {"eval/loss": result.loss}, done)
    shown = f"{100 * result.metric:.2f} %" if metric.percent else f"{result.metric:.4g}"
    when = f"after step {done}" if done else "before the first step"
    run.progress.say(f"{when}: {metric.label} {shown}, loss {result.loss:.4f}")
    history.evaluate = False
    run.evaluated_at = time.perf_counter()
    return result


def _better(run: Run, result: Evaluation) -> bool:
    """Whether this is the best so far (of equal metrics the lower loss), or the best is not in model/ any more; counts
    evaluations that bring nothing."""
    history, sign = run.history, 1 if run.task.metric.higher_is_better else -1
    if history.best is None:
        return True
    patience = run.recipe.train.early_stopping
    gain = sign * (result.metric - history.best.metric)
    history.worse = 0 if gain > (patience.min_delta if patience else 0.0) else history.worse + 1
    new, best = (sign * result.metric, -result.loss), (sign * history.best.metric, -history.best.loss)
    return history.stale or new > best


def _save(run: Run, name: str) -> None:
    """Write the model as plain libraries read it, with the task's tokenizer beside it; one process writes, all wait."""

    export = state.exported(run)

    def fill(folder: Path) -> None:
        export.save(folder)
        tokenizer = run.task.tokenizer()
        if tokenizer is not None and run.recipe.train.new_tokenizer:
            starting.replace_tokenizer(folder, export, tokenizer)
        elif tokenizer is not None:
            tokenizer.save_pretrained(folder)

    def write() -> None:
        if not run.main:
            return
        if name == runfolder.BEST:
            checkpoint.note_best(run.folder, None)  # between the two notes nobody knows what is there
        runfolder.write_folder(run.folder / name, fill)
        if name == runfolder.BEST:
            checkpoint.note_best(run.folder, run.history.done)

    run.council.everywhere(write)


def _save_checkpoint(run: Run) -> None:
    """A checkpoint on the way. A disk without room is said and does not end a training that goes well."""
    run.memory.pause()
    try:
        state.save(run)
    except LeanSurgeonError as error:
        run.saved_at = time.perf_counter()
        run.progress.say(f"No checkpoint at step {run.history.done}: {error}")
    run.memory.resume()


def _stopped(run: Run, wish: signals.Wish) -> LeanSurgeonError:
    """Save, and give the error that says how to go on."""
    if not guards.sound(run.window, run.trainer):
        raise Diverged(f"A loss or gradient up to step {run.history.done} is no finite number; nothing was saved.")
    state.save(run)
    done, steps = run.history.done, "" if run.plan.timed else f" of {run.plan.steps}"
    word = "Interrupted" if wish.kind == signals.INTERRUPT else "Stopped by a signal"
    return signals.ended(
        wish.kind,
        f"{word} after step {done}{steps}; everything is saved in {run.folder}.",
        f"Go on with the same command and --resume {run.folder}",
    )


def _roll_back(run: Run, back: guards.RollBack) -> None:
    """Return to the newest checkpoint; the step that went wrong is left out when it comes again."""
    given_up, rollbacks = [*run.history.given_up, back.step], run.history.rollbacks + 1
    found = run.council.share(lambda: checkpoint.newest(run.folder, run.progress.say))
    if rollbacks > guards.MOST_ROLLBACKS:
        raise Diverged(
            f"{back.sentence} It was the last of {guards.MOST_ROLLBACKS} rollbacks.", "Lower train.optim.lr."
        )
    if found is None:
        raise Diverged(
            f"{back.sentence} There is no whole checkpoint in {run.folder} to go back to.", "Lower train.optim.lr."
        )
    saved = run.council.share(lambda: checkpoint.read_state(found))
    run.council.everywhere(lambda: state.restore(run, found, saved))
    state.look_at_best(run)
    run.history.given_up, run.history.rollbacks = given_up, rollbacks
    run.progress.say(f"{back.sentence} Back to step {run.history.done}; step {back.step + 1} will be left out.")
