"""Evaluation: every sample counts exactly once, on any number of processes, and the count is checked.

`evaluate` evaluates any objective; `evaluate_model` scores a model as it is on the data of a recipe's task;
`evaluate_and_keep` runs during training and saves the best model so far in a format that plain libraries load.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from leansurgeon.errors import Diverged, LeanSurgeonError, RunFolderReplaced
from leansurgeon.intervals import paired_interval
from leansurgeon.progress import Say, phase, silent
from leansurgeon.tasks.base import Metric, Sums
from leansurgeon.training import data_loader, distill, distributed, guards, regularize, setup, starting, state
from leansurgeon.training.objective import Objective
from leansurgeon.training.recipe.schema import EarlyStopping, TrainingRecipe
from leansurgeon.training.runs import checkpoint
from leansurgeon.training.runs import folder as runfolder
from leansurgeon.training.runs.summary import Scores
from leansurgeon.training.state import History, Run

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn

    from leansurgeon.tasks import Task


_ONE_LABEL_PER_SAMPLE = ("image-classification", "sequence-classification")


class Evaluation(NamedTuple):
    """Mean loss (per sample, or per token for language models), the task's metric, the number of samples, all metrics
    by name, and the metric's sum and count of every batch.
    """

    loss: float
    metric: float
    samples: int
    metrics: dict[str, float]
    parts: Sequence[tuple[float, float]]

    def interval(self) -> tuple[float, float] | None:
        """Return the metric's 95 % confidence interval; None if there are too few samples or the metric is not their
        mean.
        """
        parts, counts = zip(*self.parts, strict=True)
        mean, around = sum(parts) / max(sum(counts), 1), paired_interval(parts, counts)
        if around is None or around[1] > 700:
            return None
        for scale in (float, math.exp):  # `exp` for a perplexity
            if math.isclose(self.metric, scale(mean), rel_tol=1e-4, abs_tol=1e-9):
                return scale(around[0]), scale(around[1])
        return None

    def scores(self) -> Scores:
        """Return the scores as a summary stores them."""
        low, high = self.interval() or (None, None)
        return Scores(self.loss, self.metric, self.metrics, low=low, high=high)


def evaluate(
    scored: nn.Module,
    task: Task,
    accelerator: Accelerator,
    *,
    batch: int,
    check: Callable[[], None] = lambda: None,
    workers: int = 0,
    split: str = "eval",
) -> Evaluation:
    """Return the mean loss and metric over all of `split`, in evaluation mode and without gradients.

    `scored` maps a batch to the task's `Score`. It must be the module itself and not its DDP wrapper, since one process
    may have one batch more than another. Where processes share the weights (FSDP2), the others run an extra batch that
    does not count. `check` is called before every batch and may raise; `workers` processes prefetch batches. Sums stay
    on the device in fp64 and are read once.

    Raises `LeanSurgeonError` if the samples seen are not the samples of the split, `Diverged` for a non-finite loss,
    and `OutOfMemory`.
    """
    device = accelerator.device
    kind = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
    totals = torch.zeros(5, dtype=kind, device=device)  # loss sum and count, metric sum and count, samples
    extra = torch.zeros(task.extra_sums, dtype=kind, device=device)  # extra sums that the task defines
    size, processes = task.size(split), accelerator.num_processes
    hands = data_loader.list_eval_batches(size, batch, processes, accelerator.process_index)
    turns = math.ceil(math.ceil(size / batch) / processes)
    parts = torch.zeros(turns, processes, 2, dtype=kind, device=device)
    idle = data_loader.list_eval_batches(1, 1, 1, 0) if distributed.is_split(scored) else []
    rows = [(0, row) for row in [*hands, *idle][:turns]]
    advice = f"Try --set train.eval.batch={max(1, batch // 2)}: it changes no result."
    explained = guards.memory_explained(device, f"to evaluate {batch} samples at a time", advice)
    made = data_loader.make_batches(task, split, rows, seed=0, workers=workers)
    training = scored.training
    scored.eval()
    try:
        with explained, torch.no_grad(), closing(made) as batches:
            for turn in range(turns):
                check()  # equally often on every process, though one may have a batch less
                if turn == len(rows):
                    break
                inputs = data_loader.to_device(next(batches), device)
                score = scored(inputs)
                if turn >= len(hands):
                    break
                found = torch.stack([part.to(kind) for part in score[:4]])
                totals[:4] += found
                parts[turn, accelerator.process_index] = found[2:]
                if score.extra is not None:
                    extra += score.extra.to(kind)
                totals[4] += inputs["labels"].shape[0]
    finally:
        scored.train(training)
        distributed.reshard(scored)
    *values, seen = distributed.all_reduce(totals, accelerator).tolist()
    samples = int(seen)
    labelled = int(values[3]) if task.head in _ONE_LABEL_PER_SAMPLE else samples
    if samples != size or labelled != size:
        raise LeanSurgeonError(
            f"Evaluation of task '{task.name}' saw {samples} and scored {labelled} samples of {size}.",
            "Each must count once; this is an error in the task or in leansurgeon.",
        )
    if values[1] == 0:
        raise LeanSurgeonError(f"The evaluation split of task '{task.name}' has nothing to score: every label is -100.")
    more = distributed.all_reduce(extra, accelerator).cpu().double().numpy() if task.extra_sums else None
    every = distributed.all_reduce(parts.flatten(), accelerator).reshape(-1, 2).tolist()
    sums = Sums(*values, more)
    loss = sums.loss_sum / sums.loss_count
    if math.isfinite(loss):
        metrics = task.metric_value(sums)
        if all(map(math.isfinite, metrics.values())):  # a perplexity overflows at a loss of 1,000 nats
            counted = [(part, count) for part, count in every if count]
            return Evaluation(loss, metrics[task.metric.key], samples, metrics, counted)
    raise Diverged(f"The evaluation loss is {loss:.4g}.", "A lower learning rate or a longer warm-up may help.")


def evaluate_model(
    recipe: TrainingRecipe,
    model_dir: Path,
    *,
    cpu: bool = False,
    limit_batches: int | None = None,
    say: Say = silent,
) -> Evaluation:
    """Return loss, samples and metrics of the model. All processes of the group must call this. Raises what `evaluate`
    does.
    """
    accelerator = distributed.start_accelerator(cpu=cpu, train=recipe.train, say=say)
    with accelerator.local_main_process_first():
        task = setup.prepare_task(recipe, model_dir, say)
    task = data_loader.first_batches(task, recipe.train, limit_batches)
    train, device = recipe.train, accelerator.device
    with guards.memory_explained(device):
        loaded = starting.load_start(recipe, model_dir, task)
        # Without labels, the teacher provides the targets.
        judge = distill.of_recipe(train, loaded, task, model_dir, device) if task.head == "features" else None
        scored = Objective(loaded, task, train, judge).to(device)
    return evaluate(scored, task, accelerator, batch=train.eval.batch, workers=train.workers)


def still_falling(losses: list[float]) -> bool:
    """Return whether the evaluation losses of a run, without the one before training, suggest that it ended too early.

    True if the last loss is the lowest and the last quarter of the curve accounts for more than a twentieth of the
    whole drop. A finished schedule flattens out (a cosine spends its last quarter below 15 % of the peak rate) and
    drops less. With fewer than four evaluations the answer is False.
    """
    if len(losses) < 4 or losses[-1] > min(losses):
        return False
    whole = losses[0] - losses[-1]
    quarter = losses[-1 - max(1, round(len(losses) / 4))] - losses[-1]
    return whole > 0 and quarter > 0.05 * whole


def evaluate_and_keep(run: Run) -> None:
    """Evaluate at the current step, log the result, and save the model if it is the best so far. The evaluation before
    the first step counts only where the recipe says so. Raises `Diverged`, or `RollBack` where the recipe asks for it.
    """
    clock, history = time.perf_counter(), run.history
    if run.group.processes > 1:  # batch norm statistics differ between processes
        from timm.utils import distribute_bn

        distribute_bn(run.judged, run.group.processes, reduce=True)
    train, metric, done = run.train, run.task.metric, history.done
    batches = math.ceil(run.task.size("eval") / train.eval.batch / run.group.processes)
    try:
        with phase("evaluating", batches, "batches/s", run.progress) as advance:

            def before_batch() -> None:
                run.stops.raise_if_asked()
                advance()

            result = evaluate(
                run.judged,
                run.task,
                run.trainer.accelerator,
                batch=train.eval.batch,
                check=before_batch,
                workers=train.workers,
            )
    except Diverged as error:
        if done and train.nan == "rollback":
            raise guards.RollBack(done - 1, error.message) from None
        raise
    scores = result.scores()
    if done:
        best, history.worse = verdict(history, scores, metric, train.early_stopping)
        history.last = scores
        history.eval_losses.append(result.loss)
    else:
        history.before, best = scores, train.checkpoint.keep_start
    if best:
        if train.checkpoint.keep_best:
            export_model(run, runfolder.BEST)
        history.best, history.stale = replace(scores, step=done), False
    if done:
        history.eval_seconds.append(time.perf_counter() - clock)
    patience = train.early_stopping
    if patience and history.worse >= patience.patience:
        history.early = True
        run.say(f"No improvement in {history.worse} evaluations: the training ends after step {done}.")
    run.note(type="eval", step=done, **scores.as_dict(), metric_key=metric.key, samples=result.samples)
    run.trackers.log({f"eval/{key}": value for key, value in result.metrics.items()} | {"eval/loss": result.loss}, done)
    when = f"after step {done}" if done else "before the first step"
    run.say(f"{when}: {metric.label} {metric.format_value(result.metric)}, loss {result.loss:.4f}")
    history.evaluate = False
    run.evaluated_at = time.perf_counter()


def verdict(history: History, new: Scores, metric: Metric, patience: EarlyStopping | None) -> tuple[bool, int]:
    """Return whether to save `new`, and how many evaluations in a row brought no gain, this one included.

    Save the best so far (for equal metrics, the lower loss), or any if model/ no longer holds the best.
    """
    if history.best is None:
        return True, history.worse
    sign = 1 if metric.higher_is_better else -1
    gain = sign * (new.metric - history.best.metric)
    worse = 0 if gain > (patience.min_delta if patience else 0.0) else history.worse + 1
    better = (sign * new.metric, -new.loss) > (sign * history.best.metric, -history.best.loss)
    return history.stale or better, worse


def export_model(run: Run, name: str) -> None:
    """Write the model in a format that plain libraries load, with the companion files of its source. One process
    writes, all wait.
    """

    export = state.export_model(run)
    if run.train.lora and run.main:
        export = regularize.merge_lora(export)

    def fill(folder: Path) -> None:
        export.save(folder)
        starting.replace_tokenizer(folder, export, run.task, anew=run.train.new_tokenizer)

    def write() -> None:
        run.check_folder()
        if name == runfolder.BEST:
            checkpoint.note_best(run.folder, None)  # until the second note, the contents of model/ are unknown
        runfolder.write_folder(run.folder / name, fill)
        if name == runfolder.BEST:
            checkpoint.note_best(run.folder, run.history.done)

    run.group.on_main(write)


def save_checkpoint(run: Run) -> None:
    """Write a checkpoint during training. A full disk is reported, but does not end a training that goes well."""
    try:
        state.save(run)
    except RunFolderReplaced:
        raise
    except LeanSurgeonError as error:
        run.saved_at = time.perf_counter()
        run.say(f"No checkpoint at step {run.history.done}: {error}")
