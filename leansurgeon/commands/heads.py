"""Heads: how important each one is, how many can be pruned, and a checkpoint without them."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from leansurgeon.checkpoints.proof.report_numbers import sentence
from leansurgeon.checkpoints.publish.output import check_apart, hold_output
from leansurgeon.checkpoints.record import SurgeryRecord
from leansurgeon.checkpoints.recorded.decided import Importance
from leansurgeon.checkpoints.source import Source, open_source
from leansurgeon.commands.command import Answer, Command
from leansurgeon.commands.in_memory import Cut
from leansurgeon.commands.options import DataRequest, DeviceRequest, Force, PushRequest, Seed, spell_share
from leansurgeon.commands.samples import data_to_measure
from leansurgeon.errors import UsageError, short
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.measure.data.choose_task import has_two_stacks
from leansurgeon.progress import Say
from leansurgeon.report.runs import HEADS
from leansurgeon.report.tables.cut import closing
from leansurgeon.request import Access, ModelName, Opt, command_line
from leansurgeon.surgery.shrink import DecidedCut, blaming_weights, carry_out
from leansurgeon.training.runs.folder import find_run, keep_beside
from leansurgeon.words import wrap

if TYPE_CHECKING:
    import numpy as np

    from leansurgeon.measure.heads.document import HeadOptions, Study
    from leansurgeon.report.charts.forms import Chart


class HeadsRequest(DataRequest, DeviceRequest, PushRequest, Access):
    """A model, how its heads are measured, and how many to prune."""

    model: ModelName
    samples: Annotated[int | None, Field(ge=2), Opt("Training samples that importance is taken from.", "Data")] = None
    judge_samples: Annotated[int | None, Field(ge=2), Opt("Held-out samples to judge on, at most.", "Data")] = None
    ablate: Annotated[bool, Opt("Also switch off every head alone and test it: one pass a head.", "Method")] = False
    curve: Annotated[
        bool, Opt("Score by the share of heads off, in several orders.", "Method", ("--curve/--no-curve",))
    ] = True
    steps: Annotated[int, Field(ge=1, le=100), Opt("Steps of the curve.")] = 10
    prune: Annotated[
        str | None,
        BeforeValidator(spell_share),
        Opt("Remove this share of every layer's heads, and write the model: 40%.", "Method", cli=str),
    ] = None
    out: Annotated[Path | None, Opt("Folder for --prune.", "Output", ("--out", "-o"))] = None
    heal: Annotated[
        bool, Opt("After --prune, refit output projections on the sample data.", "Method", ("--heal/--no-heal",))
    ] = True
    seed: Seed = 0
    force: Force = False

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        if (self.prune is None) != (self.out is None):
            raise UsageError("--prune and -o belong together: how many heads go, and where the rest is written.")
        if self.push and self.prune is None:
            raise UsageError("--push is for a pruned model.", "Add --prune SHARE -o FOLDER.")
        return self


@dataclass(frozen=True)
class Heads(Answer):
    """The importance of every head, the cost of removing it if that was measured, and the pruned model."""

    pruned: Cut | None = None

    @property
    def folder(self) -> Path | None:
        """The pruned model's folder."""
        return self.pruned and self.pruned.folder

    @property
    def importance(self) -> list[np.ndarray]:
        """One array for every attention layer, with a number for each head."""
        import numpy as np

        return [np.asarray(one["importance"]) for one in self.document["attentions"]]

    def charts(self) -> list[Chart]:
        """Return the importance map and the pruning curve, as a notebook shows them."""
        from leansurgeon.report.charts.sections import head_charts
        from leansurgeon.report.runs import HeadStudy

        return head_charts(HeadStudy.from_dict(self.document))


def heads(request: HeadsRequest, say: Say) -> Heads:
    """Measure the importance of every head, the cost of removing it, and how many heads can be pruned.

    For a run's folder, the result is also saved there as heads.json.

    >>> import leansurgeon, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> cut = leansurgeon.shrink("digits-vit", layers=2, out=f"{folder}/lean", proof=False, progress=False)
    >>> found = leansurgeon.heads(cut, "task:digits", samples=64, judge_samples=64, curve=False, progress=False)
    >>> [layer.shape for layer in found.importance]
    [(4,), (4,)]

    Raises `UsageError` for a model without weights or a share that gives no whole head, before anything is measured;
    and what opening, measuring and writing raise.
    """
    from leansurgeon.measure.device import choose_device
    from leansurgeon.measure.heads.document import HeadOptions
    from leansurgeon.report.tables.heads import describe
    from leansurgeon.surgery import prune

    model, seed = request.model, request.seed
    share = None if request.prune is None else prune.share(request.prune)
    options = HeadOptions(**request.model_dump(include={"ablate", "curve", "steps", "judge_samples", "seed"}))
    with ExitStack() as stack:
        if share is not None:
            stack.enter_context(hold_output(request.out, force=request.force))
        opened = open_source(model, allow_pickle=request.allow_pickle)
        if opened.weights is None:
            raise UsageError(
                f"'{model}' is a preset without weights, so its heads have no importance yet.",
                "Give a trained model's folder.",
            )
        if not opened.learned:
            say(f"{opened.name} was initialised and never trained: its importance is that of random weights.")
        if share is not None:
            check_apart(request.out, opened.folder)
            device = choose_device(request.device)
            prune.check(opened, share)
        sample = data_to_measure(opened, request.data, model, "Importance", request.samples, seed, say, request.columns)
        study = measure_heads(opened, sample, options, say)
        document = {
            "schema_version": 1,
            "kind": "heads",
            "model": opened.name,
            "family": opened.architecture.name,
            "parameters": opened.parameters.total,
            **study.document,
        }
        smaller = None
        if share is not None:
            # An encoder-decoder cannot run on sample data block by block.
            heal = request.heal and not has_two_stacks(opened)
            decided = prune.decide(
                opened, study.sites, study.importance, share, sample, seed=seed, heal=heal, say=say, device=device
            )
            by_head = tuple(tuple(entry["importance"]) for entry in study.document["attentions"])
            decided = replace(decided, record=replace(decided.record, importance=Importance(by_head)))
            call = command_line("heads", request)
            record = carry_out(decided, request.out, force=request.force, call=call, say=say)
            smaller = prune_model(decided, record, request.out, share, heal)
    document |= {"prune": smaller.as_dict()} if smaller else {}
    if run := find_run(model):
        keep_beside(run / HEADS, document, say)
    lines = describe(document | {"model": short(document["model"], 60)})
    return Heads(document, "\n".join([*lines, *([str(smaller)] if smaller else [])]), pruned=smaller)


def prune_model(decided: DecidedCut, record: SurgeryRecord, out: Path, share: float, heal: bool) -> Cut:
    """Return the pruned checkpoint as a result: its --json document, and the same as text."""
    proof, steps = record.proof, decided.plan
    before, after = steps.before, steps.after
    a, b = steps.parameters_before.total, steps.parameters_after.total
    document = {
        "asked": share,
        "out": str(out),
        "before": before.as_dict(),
        "after": after.as_dict(),
        "parameters_before": a,
        "parameters_after": b,
        "healed": heal,
        "kept_heads": {layer: list(kept) for layer, kept in record.decided.kept_heads.items()},
        "library": steps.architecture.library,
        "proof": proof.as_dict(),
        "language": record.language,
    }
    lines = closing(out, proof).split("\n")
    lines += wrap(
        f"Heads a layer: {before.column('heads')} before, {after.column('heads')} now (head_dim "
        f"{after.column('head_dim')}); parameters {a:,} before, {b:,} now ({100 * (b / a - 1):+.1f} %)."
    )
    if steps.architecture.library == "leansurgeon":
        lines += wrap("No library stores such heads here: the folder carries its own modelling file.")
    lines += wrap(sentence(proof.compared, record.language))
    if heal:
        lines += wrap(
            f"`leansurgeon shrink MODEL --heads {after.column('heads')} --head-dim keep --calibrate DATA` chooses "
            "heads by what the others can take over instead, and kept more where it was measured."
        )
    else:
        lines += wrap("Output projections were not refitted; `leansurgeon retrain` recovers what that costs.")
    return Cut(out, record, document, "\n".join(lines))


def measure_heads(opened: Source, sample: Calibration, options: HeadOptions, say: Say) -> Study:
    """Measure the importance of every head. The model is in memory only meanwhile, so that pruning can calibrate."""
    import torch

    from leansurgeon.checkpoints.model import load
    from leansurgeon.measure.heads.document import study

    say(f"Measuring on {sample.says} ...")
    with blaming_weights(opened):
        loaded = load(opened.folder, tower=opened.tower).alone()
        loaded.model.to("cuda" if torch.cuda.is_available() else "cpu").requires_grad_(False)
        return study(loaded, sample, options)


COMMAND = Command(
    "heads", HeadsRequest, heads, ("leansurgeon heads my-model --data texts/ --prune 50% -o runs/pruned",)
)
