"""What a recipe wants measured besides the task's metric, on the way and at the end: kappa, and how many heads may go.

    measure: {kappa: {samples: 64, every: 50ep}, heads: {every: 10ep}}

Each time the same samples, spread over the evaluation split (and, for importance, the training split). The last
weights of a step are looked at, or their average where that is what is evaluated; a row of `metrics.jsonl` takes what
was found. Nothing is drawn and no mode, gradient or buffer changes, so a training gives the same losses with and
without it. A row stands before the evaluation and the checkpoint of its step: whoever resumes has it already.
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
    """What the recipe wants measured; all of it at the end."""
    wanted = run.recipe.measure
    return [one for one in (wanted.kappa, wanted.heads) if one] if wanted else []


def list_due(run: Run, done: int) -> list[Kappa | Heads]:
    """What of it is due after step `done`, on the way."""
    return [one for one in list_wanted(run) if one.every and run.plan.due(one.every, done)]


def measure(run: Run, wanted: list[Kappa | Heads], found: JsonObject, *, end: bool = False) -> None:
    """Measure with the present weights, on one process; what is found is put into `found` under `kappa` and `heads`,
    one by one for whoever ends it early. A row is written for each that also comes on the way. Called by all processes.
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
            # An early stop comes after its step's rows.
            written = end and run.history.early and one in list_due(run, done)
            if one.every and not written:
                epoch = round(run.plan.position(done) / run.plan.epoch_samples, 4)
                run.note(type=one.kind, step=done, epoch=epoch, **found[one.kind])
                run.say(_sentence(one.kind, found[one.kind], done))


def _kappa(run: Run, export: Loaded, wanted: Kappa) -> JsonObject:
    """Conditioning of the attention blocks, raw and invariant (see `measure.kappa.study`)."""
    from leansurgeon.measure.kappa import study

    samples = min(wanted.samples, run.task.size("eval"))
    batches = _batches(run, "eval", samples)
    return study.measure_invariants(export, batches, run.task.token_mask, samples, probes=wanted.probes)


def _heads(run: Run, export: Loaded, wanted: Heads) -> JsonObject:
    """Importance of the heads, and how many could go (see `measure.heads.pruning.at_epoch`)."""
    from leansurgeon.measure.heads.pruning import at_epoch

    fit = list(_batches(run, "train", min(wanted.samples, run.task.size("train"))))
    judged = list(_batches(run, "eval", min(wanted.samples, run.task.size("eval"))))
    return at_epoch(export, run.task, fit, judged, steps=wanted.steps)


def _batches(run: Run, split: str, samples: int) -> Iterator[data_loader.Batch]:
    """`samples` of a split, evenly spread: a folder of images stands by class."""
    spread = inner(run.task.size(split), samples)
    for at in data_loader.list_eval_batches(samples, min(samples, run.plan.micro), 1, 0):
        yield run.task.batch(split, spread[at], seed=0, epoch=0)


def _sentence(kind: str, figures: JsonObject, done: int) -> str:
    when = f"after step {done}" if done else "before the first step"
    if kind == "heads":
        return f"{when}: {100 * figures['prunable']:.0f} % of the heads could go"
    value, bound = figures["model"]["median"], figures["model"]["median_lower_bound"]
    return f"{when}: kappa " + (f"{value:.4g}" if value is not None else f"at least {bound:.4g}")
