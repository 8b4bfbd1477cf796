"""Heads: how important each one is, how many can go, and a checkpoint without them."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from leansurgeon.checkpoints.proof.report_numbers import sentence
from leansurgeon.checkpoints.publish.output import check_apart, held
from leansurgeon.checkpoints.record import SurgeryRecord
from leansurgeon.checkpoints.recorded.decided import Importance
from leansurgeon.checkpoints.source import Source, open_source
from leansurgeon.errors import UsageError
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.measure.data.choose_task import has_two_stacks
from leansurgeon.progress import Say
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.report.evidence.folder import HEADS
from leansurgeon.report.tables.decided import closing
from leansurgeon.surgery.shrink import Decided, blaming_weights, carry_out
from leansurgeon.training.runs.folder import keep_beside, run_of
from leansurgeon.training.runs.sample_data import data_to_measure
from leansurgeon.words import wrap

if TYPE_CHECKING:
    from leansurgeon.measure.heads.document import Options, Study


@dataclass(frozen=True)
class Pruning:
    """What `--prune` asks for: the share of every layer's heads that goes, and where the rest is written. `heal` refits
    the output projections.
    """

    share: float
    out: Path
    heal: bool = True
    force: bool = False
    device: str = "auto"


@dataclass(frozen=True)
class Pruned:
    """The smaller checkpoint that was written: what was decided, its record, and what was asked for."""

    decided: Decided
    record: SurgeryRecord
    asked: Pruning

    def as_dict(self) -> JsonObject:
        """What --json says of it."""
        steps = self.decided.plan
        return {
            "asked": self.asked.share,
            "out": str(self.asked.out),
            "before": steps.before.as_dict(),
            "after": steps.after.as_dict(),
            "parameters_before": steps.parameters_before.total,
            "parameters_after": steps.parameters_after.total,
            "healed": self.asked.heal,
            "kept_heads": {layer: list(kept) for layer, kept in self.record.decided.kept_heads.items()},
            "library": steps.architecture.library,
            "proof": self.record.proof.as_dict(),
            "language": self.record.language,
        }

    def told(self) -> str:
        """The same for a person."""
        proof, steps = self.record.proof, self.decided.plan
        before, after = steps.before, steps.after
        a, b = steps.parameters_before.total, steps.parameters_after.total
        lines = closing(self.asked.out, proof).split("\n")
        lines += wrap(
            f"Heads a layer: {before.column('heads')} before, {after.column('heads')} now (head_dim "
            f"{after.column('head_dim')}); parameters {a:,} before, {b:,} now ({100 * (b / a - 1):+.1f} %)."
        )
        if steps.architecture.library == "leansurgeon":
            lines += wrap("No library stores such heads here: the folder carries its own modelling file.")
        lines += wrap(sentence(proof.compared, self.record.language))
        if self.asked.heal:
            lines += wrap(
                f"`leansurgeon shrink MODEL --heads {after.column('heads')} --head-dim keep --calibrate DATA` chooses "
                "heads by what the others can take over instead, and kept more where it was measured."
            )
        else:
            lines += wrap("Output projections were not refitted; `leansurgeon retrain` takes back what that costs.")
        return "\n".join(lines)


@dataclass(frozen=True)
class Measured:
    """The heads of a model: the document that JSON holds, and the pruned checkpoint where one was written."""

    document: JsonObject
    pruned: Pruned | None = field(default=None, repr=False)


def heads(
    model: str,
    data: str | None,
    options: Options,
    pruning: Pruning | None,
    say: Say,
    *,
    samples: int | None = None,
    columns: str | None = None,
    allow_pickle: bool = False,
) -> Measured:
    """Measure the heads of `model` on sample data, and prune where that is asked for. On a run's folder the document is
    also kept as heads.json in it.

    Raises `UsageError` for a model without weights or a share that is no whole head, before anything is measured; and
    what opening, measuring and writing raise.
    """
    from leansurgeon.measure.device import chosen
    from leansurgeon.surgery import prune

    with ExitStack() as stack:
        if pruning is not None:
            stack.enter_context(held(pruning.out, force=pruning.force))
        opened = open_source(model, allow_pickle=allow_pickle)
        if opened.weights is None:
            raise UsageError(
                f"'{model}' is a preset and has no weights, so its heads have done nothing yet.",
                "Give a trained model's folder.",
            )
        if not opened.learned:
            say(f"{opened.name} was initialised and never trained: its importance is that of random weights.")
        if pruning is not None:
            check_apart(pruning.out, opened.folder)
            pruning = replace(pruning, device=chosen(pruning.device))
            prune.check(opened, pruning.share)
            if has_two_stacks(opened):  # sample data cannot be run through both, block by block
                pruning = replace(pruning, heal=False)
        sample = data_to_measure(opened, data, model, "Importance", samples, options.seed, say, columns)
        study = measured(opened, sample, options, say)
        document = {
            "schema_version": 1,
            "kind": "heads",
            "model": opened.name,
            "family": opened.architecture.name,
            "parameters": opened.parameters.total,
            **study.document,
        }
        smaller = pruned(opened, study, pruning, sample, options.seed, say) if pruning else None
    document |= {"prune": smaller.as_dict()} if smaller else {}
    if run := run_of(model):
        keep_beside(run / HEADS, document, say)
    return Measured(document, smaller)


def measured(opened: Source, sample: Calibration, options: Options, say: Say) -> Study:
    """The importance of every head. The model is in memory as long as this lasts, and gone when pruning calibrates."""
    import torch

    from leansurgeon.checkpoints.model import load
    from leansurgeon.measure.heads.document import study

    say(f"Measuring on {sample.says} ...")
    with blaming_weights(opened):
        loaded = load(opened.folder, tower=opened.tower).alone()
        loaded.model.to("cuda" if torch.cuda.is_available() else "cpu").requires_grad_(False)
        return study(loaded, sample, options)


def pruned(opened: Source, study: Study, pruning: Pruning, sample: Calibration, seed: int, say: Say) -> Pruned:
    """Write the smaller checkpoint."""
    from leansurgeon.surgery import prune

    asked = pruning.share
    decided = prune.decide(
        opened,
        study.sites,
        study.importance,
        asked,
        sample,
        seed=seed,
        heal=pruning.heal,
        say=say,
        device=pruning.device,
    )
    options = study.document["options"]
    by_head = tuple(tuple(entry["importance"]) for entry in study.document["attentions"])
    importance = Importance(options["reduction"], options["normalise"], by_head)
    decided = replace(decided, record=replace(decided.record, importance=importance))
    return Pruned(decided, carry_out(decided, pruning.out, force=pruning.force, say=say), pruning)


def checked(
    reduction: str, normalize: str, prune: str | None, out: Path | None, heal: bool, force: bool, device: str
) -> Pruning | None:
    """Refuse what cannot be before anything is opened; what --prune asks for. Raises `UsageError`."""
    for value, flag, known in (
        (reduction, "--reduction", ("sample", "token", "batch")),
        (normalize, "--normalize", ("none", "layer")),
    ):
        if value not in known:
            raise UsageError(f"{flag} {value}: give one of {', '.join(known)}.")
    if (prune is None) != (out is None):
        raise UsageError("--prune and -o belong together: how many heads go, and where the rest is written.")
    if prune is None or out is None:
        return None
    from leansurgeon.surgery.prune import share

    return Pruning(share(prune), out, heal, force, device)
