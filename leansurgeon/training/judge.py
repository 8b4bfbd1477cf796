"""The model on the way: evaluated, kept where it is the best so far, and written as plain libraries read it."""

from __future__ import annotations

import math
import time
from pathlib import Path

from leansurgeon.errors import Diverged, LeanSurgeonError, RunFolderReplaced
from leansurgeon.progress import phase
from leansurgeon.tasks.base import Metric
from leansurgeon.training import starting, state
from leansurgeon.training.evaluate import Evaluation, evaluate
from leansurgeon.training.processes import engine
from leansurgeon.training.recipe.settings import EarlyStopping
from leansurgeon.training.runs import checkpoint
from leansurgeon.training.runs import folder as runfolder
from leansurgeon.training.runs.summary import Scores
from leansurgeon.training.state import History, Run
from leansurgeon.training.update import lora
from leansurgeon.training.watch import guards


def evaluated(run: Run) -> Evaluation:
    """Evaluate at the present step, write it down, and keep the model if it is the best so far. The one before the
    first step counts only where the recipe says so.
    """
    clock, history = time.perf_counter(), run.history
    engine.average_statistics(run.judged, run.trainer.accelerator)
    result = _evaluation(run)
    if history.done:
        _taken_in(run, result)
        history.eval_seconds.append(time.perf_counter() - clock)
        patience = run.recipe.train.early_stopping
        if patience and history.worse >= patience.patience:
            history.early = True
            run.progress.say(f"No better for {history.worse} evaluations: the training ends after step {history.done}.")
    else:
        history.before = result.scores()
        if run.recipe.train.checkpoint.keep_start:
            _kept(run, result)
    _told(run, result)
    history.evaluate = False
    run.evaluated_at = time.perf_counter()
    return result


def _evaluation(run: Run) -> Evaluation:
    """The evaluation itself. Raises `Diverged`, or where the recipe wants it `RollBack`."""
    train = run.recipe.train
    batches = math.ceil(run.task.size("eval") / train.eval.batch / run.council.processes)
    options = {"batch": train.eval.batch, "workers": train.workers}
    try:
        with phase("evaluating", batches, "batches/s", run.progress) as advance:

            def before_batch() -> None:
                run.stops.raise_if_asked()
                advance()

            return evaluate(run.judged, run.task, run.trainer.accelerator, check=before_batch, **options)
    except Diverged as error:
        if run.history.done and train.nan == "rollback":
            raise guards.RollBack(run.history.done - 1, error.message) from None
        raise


def _taken_in(run: Run, result: Evaluation) -> None:
    """Note an evaluation of trained weights, and save them where they are the best so far."""
    history, scores = run.history, result.scores()
    best, history.worse = verdict(history, scores, run.task.metric, run.recipe.train.early_stopping)
    history.last = scores
    history.eval_losses.append(result.loss)
    if best:
        _kept(run, result)


def _kept(run: Run, result: Evaluation) -> None:
    """The present model is the best so far."""
    if run.recipe.train.checkpoint.keep_best:
        saved(run, runfolder.BEST)
    run.history.best, run.history.stale = result.scores(run.history.done), False


def verdict(history: History, new: Scores, metric: Metric, patience: EarlyStopping | None) -> tuple[bool, int]:
    """Whether `new` is the best so far (of equal metrics the lower loss), or the best is not in model/ any more; and
    how many evaluations in a row have brought nothing, this one included.
    """
    if history.best is None:
        return True, history.worse
    sign = 1 if metric.higher_is_better else -1
    gain = sign * (new.metric - history.best.metric)
    worse = 0 if gain > (patience.min_delta if patience else 0.0) else history.worse + 1
    better = (sign * new.metric, -new.loss) > (sign * history.best.metric, -history.best.loss)
    return history.stale or better, worse


def _told(run: Run, result: Evaluation) -> None:
    """An evaluation in the log, the trackers and on stderr."""
    metric, done = run.task.metric, run.history.done
    run.note(type="eval", step=done, **result.scores().as_dict(), metric_key=metric.key, samples=result.samples)
    run.trackers.log({f"eval/{key}": value for key, value in result.metrics.items()} | {"eval/loss": result.loss}, done)
    shown = f"{100 * result.metric:.2f} %" if metric.percent else f"{result.metric:.4g}"
    when = f"after step {done}" if done else "before the first step"
    run.progress.say(f"{when}: {metric.label} {shown}, loss {result.loss:.4f}")


def saved(run: Run, name: str) -> None:
    """Write the model as plain libraries read it, with what lay beside its source; one process writes, all wait."""

    export = state.exported(run)
    if run.recipe.train.lora and run.main:
        export = lora.merged(export)

    def fill(folder: Path) -> None:
        export.save(folder)
        starting.replace_tokenizer(folder, export, run.task, anew=run.recipe.train.new_tokenizer)

    def write() -> None:
        run.check_folder()
        if name == runfolder.BEST:
            checkpoint.note_best(run.folder, None)  # between the two notes nobody knows what is there
        runfolder.write_folder(run.folder / name, fill)
        if name == runfolder.BEST:
            checkpoint.note_best(run.folder, run.history.done)

    run.council.on_main(write)


def save_checkpoint(run: Run) -> None:
    """A checkpoint on the way. A disk without room is said and does not end a training that goes well."""
    try:
        state.save(run)
    except RunFolderReplaced:
        raise
    except LeanSurgeonError as error:
        run.saved_at = time.perf_counter()
        run.progress.say(f"No checkpoint at step {run.history.done}: {error}")
