"""Measurements besides the task's metric, during and after training: kappa, and how many heads could be pruned.

    measure: {kappa: {samples: 64, every: 50ep}, heads: {every: 10ep}}

Each measurement uses the same samples, spread over the evaluation split (and, for importance, the training split). It
measures the current weights, or their moving average where that is what is evaluated, and writes a row to
`metrics.jsonl`. It draws no random numbers and changes no mode, gradient or buffer, so losses are the same with and
without it. A row is written before the evaluation and the checkpoint of its step, so a resumed run already has it.
"""

from __future__ import annotations

from collections.abc import Iterator

from leansurgeon.checkpoints.model import Loaded
from leansurgeon.measure.data.batches import inner
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.training import data_loader, state
from leansurgeon.training.recipe.schema import Heads, Kappa
from leansurgeon.training.state import Run


def list_wanted(run: Run) -> list[Kappa | Heads]:
    """Return what the recipe wants measured; all of it is measured at the end."""
    wanted = run.recipe.measure
    return [one for one in (wanted.kappa, wanted.heads) if one] if wanted else []


def list_due(run: Run, done: int) -> list[Kappa | Heads]:
    """Return which measurements are due after step `done`."""
    return [one for one in list_wanted(run) if one.every and run.plan.due(one.every, done)]


def measure(run: Run, wanted: list[Kappa | Heads], found: JsonObject, *, end: bool = False) -> None:
    """Measure with the current weights, on one process, and store each result at once in `found` under `kappa` and
    `heads`.

    Each that is also due during training gets a row. All processes must call this.
    """
    if not wanted:
        return
    export = state.export_model(run)
    if not run.main:
        return
    with state.generators_kept(run.device):
        for one in wanted:
            found[one.kind] = _kappa(run, export, one) if one.kind == "kappa" else _heads(run, export, one)
            done = run.history.done
            # An early stop comes after its step's rows were written.
            written = end and run.history.early and one in list_due(run, done)
            if one.every and not written:
                epoch = round(run.plan.position(done) / run.plan.epoch_samples, 4)
                run.note(type=one.kind, step=done, epoch=epoch, **found[one.kind])
                run.say(_sentence(one.kind, found[one.kind], done))


def _kappa(run: Run, export: Loaded, wanted: Kappa) -> JsonObject:
    """Return the conditioning of the attention blocks, raw and invariant (see `measure.kappa.study`)."""
    from leansurgeon.measure.kappa import study

    samples = min(wanted.samples, run.task.size("eval"))
    batches = _batches(run, "eval", samples)
    return study.measure_invariants(export, batches, run.task.token_mask, samples, probes=wanted.probes)


def _heads(run: Run, export: Loaded, wanted: Heads) -> JsonObject:
    """Return the importance of the heads, and how many could be pruned (see `measure.heads.pruning.at_epoch`)."""
    from leansurgeon.measure.heads.pruning import at_epoch

    fit = list(_batches(run, "train", min(wanted.samples, run.task.size("train"))))
    judged = list(_batches(run, "eval", min(wanted.samples, run.task.size("eval"))))
    return at_epoch(export, run.task, fit, judged, steps=wanted.steps)


def _batches(run: Run, split: str, samples: int) -> Iterator[data_loader.Batch]:
    """Yield `samples` of a split, evenly spread, since a folder of images is sorted by class."""
    spread = inner(run.task.size(split), samples)
    for at in data_loader.list_eval_batches(samples, min(samples, run.plan.micro), 1, 0):
        yield run.task.batch(split, spread[at], seed=0, epoch=0)


def _sentence(kind: str, figures: JsonObject, done: int) -> str:
    when = f"after step {done}" if done else "before the first step"
    if kind == "heads":
        return f"{when}: {100 * figures['prunable']:.0f} % of the heads could go"
    value, bound = figures["model"]["median"], figures["model"]["median_lower_bound"]
    return f"{when}: kappa " + (f"{value:.4g}" if value is not None else f"at least {bound:.4g}")
