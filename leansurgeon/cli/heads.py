"""`leansurgeon heads`: how important each attention head is, how many can go, and a checkpoint without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leansurgeon.cli.common import AllowPickle, TrustRemoteCode, hold, progress, say
from leansurgeon.errors import UsageError, short
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.words import wrap

if TYPE_CHECKING:
    from leansurgeon.checkpoints.source import Source
    from leansurgeon.measure.data.calibration import Calibration
    from leansurgeon.measure.heads.document import Options, Study


def heads(
    model: Annotated[str, typer.Argument(help="Folder, run, hub id or timm/NAME.", show_default=False)],
    data: Annotated[
        str | None,
        typer.Option(
            help="Sample data: text files, a folder of images, task:NAME,key=value; for an encoder with a decoder text "
            "or FILE.tsv with input<TAB>answer. Default: the data that a run was trained on.",
            show_default=False,
        ),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=2, help="Training samples that importance is taken from.", show_default=False)
    ] = None,
    judge_samples: Annotated[
        int | None, typer.Option(min=2, help="Held-out samples to judge on, at most.", show_default=False)
    ] = None,
    reduction: Annotated[
        str, typer.Option(help="Absolute value per sample (the paper), token or batch (two other conventions).")
    ] = "sample",
    normalize: Annotated[
        str, typer.Option(help="layer divides by each layer's l2 norm, as the paper advises; none compares layers too.")
    ] = "none",
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Also switch off every head alone and test it: one pass a head.")
    ] = False,
    curve: Annotated[
        bool, typer.Option("--curve/--no-curve", help="Score by the share of heads off, in several orders.")
    ] = True,
    steps: Annotated[int, typer.Option(min=1, max=100, help="Steps of the curve.")] = 10,
    random: Annotated[int, typer.Option(min=0, max=100, help="Random orders to compare with.")] = 3,
    prune: Annotated[
        str | None,
        typer.Option(help="Write the model without so many heads of every layer, such as 40%.", show_default=False),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for --prune.", show_default=False)] = None,
    heal: Annotated[
        bool, typer.Option("--heal/--no-heal", help="After --prune, refit output projections on the sample data.")
    ] = True,
    plots: Annotated[
        Path | None, typer.Option(help="Folder for charts as SVG, PNG and PDF.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of samples and random orders.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing output folder.")] = False,
    allow_pickle: AllowPickle = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Importance of every head, what its absence costs, and how many heads can go.

    On a run's folder the result is also kept as heads.json in it.
    """
    asked = checked(data, reduction, normalize, prune, out, plots, force)
    from leansurgeon.checkpoints.source import open_source
    from leansurgeon.measure.data import pairs
    from leansurgeon.measure.heads.document import Options
    from leansurgeon.report.evidence.folder import HEADS
    from leansurgeon.report.tables.heads import describe
    from leansurgeon.training.runs import folder as runfolder
    from leansurgeon.training.runs.sample_data import data_to_measure

    opened = open_source(model, allow_pickle=allow_pickle)
    if opened.weights is None:
        raise UsageError(
            f"'{model}' is a preset and has no weights, so its heads have done nothing yet.",
            "Give a trained model's folder.",
        )
    if not opened.learned:
        say(f"{opened.name} was initialised and never trained: its importance is that of random weights.")
    if asked is not None:
        check_prune(opened, asked, out)
    sample = data_to_measure(opened, data, model, "Importance", samples, seed, say)
    options = Options(reduction, normalize, ablate, curve, steps, random, judge_samples, seed)
    found = measured(opened, sample, options)
    document = {
        "schema_version": 1,
        "kind": "heads",
        "model": opened.name,
        "family": opened.architecture.name,
        "parameters": opened.parameters.total,
        **found.document,
    }
    if asked is not None:
        heal = heal and not pairs.has_two_stacks(opened)  # sample data cannot be run through both, block by block
        document["prune"] = pruned(opened, found, asked, sample, seed, out, heal=heal, force=force)
    files = []
    if plots is not None:
        from leansurgeon.report.charts.heads import head_charts
        from leansurgeon.report.charts.render import save
        from leansurgeon.report.evidence.studies import heads_of

        files = [file for chart in head_charts(heads_of(document)) for file in save(chart, plots / chart.key)]
    if as_json:
        print(json.dumps(document))
    else:
        print("\n".join(describe(document | {"model": short(document["model"], 60)})))
        if "prune" in document:
            print("\n".join(outcome(document["prune"])))
    for file in files:
        say(f"Wrote {file}.")
    if run := runfolder.run_of(model):
        runfolder.write_json(run / HEADS, document)
        say(f"Kept as {run / HEADS}.")


def checked(
    data: str | None,
    reduction: str,
    normalize: str,
    prune: str | None,
    out: Path | None,
    plots: Path | None,
    force: bool,
) -> float | None:
    """Refuse what cannot be before anything is opened; the share of --prune as a number."""
    for value, flag, known in (
        (reduction, "--reduction", ("sample", "token", "batch")),
        (normalize, "--normalize", ("none", "layer")),
    ):
        if value not in known:
            raise UsageError(f"{flag} {value}: give one of {', '.join(known)}.")
    if (prune is None) != (out is None):
        raise UsageError("--prune and -o belong together: how many heads go, and where the rest is written.")
    if plots is not None:
        from leansurgeon.report.charts.render import check

        check(plots)
    if prune is None:
        return None
    from leansurgeon.surgery.prune import share

    asked = share(prune)
    hold(out, force=force)
    return asked


def check_prune(opened: Source, asked: float, out: Path) -> None:
    """Refuse a cut that cannot be before anything is measured."""
    from leansurgeon.checkpoints.publish.output import check_apart
    from leansurgeon.surgery import prune

    check_apart(out, opened.folder)
    prune.check(opened, asked)


def measured(opened: Source, sample: Calibration, options: Options) -> Study:
    """The importance of every head. The model is in memory as long as this lasts, and gone when pruning calibrates."""
    import torch

    from leansurgeon.checkpoints.model import load
    from leansurgeon.measure.heads.document import study
    from leansurgeon.surgery.shrink import blaming_weights

    say(f"Measuring on {sample.says} ...")
    with blaming_weights(opened):
        loaded = load(opened.folder)
        loaded.model.to("cuda" if torch.cuda.is_available() else "cpu").requires_grad_(False)
        return study(loaded, sample, options, progress)


def pruned(
    opened: Source, found: Study, asked: float, sample: Calibration, seed: int, out: Path, *, heal: bool, force: bool
) -> JsonObject:
    """Write the smaller checkpoint and give what is to be said of it."""
    from dataclasses import replace

    from leansurgeon.surgery import prune
    from leansurgeon.surgery.shrink import carry_out

    decided = prune.decide(opened, found.sites, found.importance, asked, sample, seed=seed, heal=heal, say=say)
    options = found.document["options"]
    importance = {key: options[key] for key in ("reduction", "normalise")}
    importance["by_head"] = [entry["importance"] for entry in found.document["attentions"]]
    decided = replace(decided, record=decided.record | {"importance": importance})
    written = carry_out(decided, out, force=force, say=say)
    steps = decided.plan
    before, after = steps.parameters_before.total, steps.parameters_after.total
    return {
        "asked": asked,
        "out": str(out),
        "before": steps.before.as_dict(),
        "after": steps.after.as_dict(),
        "parameters_before": before,
        "parameters_after": after,
        "healed": heal,
        "kept_heads": written.decided.get("kept_heads", {}),
        "library": steps.architecture.library,
        "proof": written.proof.as_dict(),
        "language": written.language,
    }


def outcome(found: dict[str, Any]) -> list[str]:
    """What --prune has written."""
    from leansurgeon.checkpoints.proof.report_numbers import sentence
    from leansurgeon.checkpoints.record import Proof
    from leansurgeon.report.tables.decided import closing
    from leansurgeon.shape import Shape

    proof = Proof.from_dict(found["proof"])
    before, after = Shape.from_dict(found["before"]), Shape.from_dict(found["after"])
    a, b = found["parameters_before"], found["parameters_after"]
    lines = closing(Path(found["out"]), proof).split("\n")
    lines += wrap(
        f"Heads a layer: {before.column('heads')} before, {after.column('heads')} now (head_dim "
        f"{after.column('head_dim')}); parameters {a:,} before, {b:,} now ({100 * (b / a - 1):+.1f} %)."
    )
    if found["library"] == "leansurgeon":
        lines += wrap("No library stores such heads here: the folder carries its own modelling file.")
    lines += wrap(sentence(proof.compared, found["language"]))
    if found["healed"]:
        lines += wrap(
            f"`leansurgeon shrink MODEL --heads {after.column('heads')} --head-dim keep --calibrate DATA` chooses "
            "heads by what the others can take over instead, and kept more where it was measured."
        )
    else:
        lines += wrap("Output projections were not refitted; `leansurgeon retrain` takes back what that costs.")
    return lines
