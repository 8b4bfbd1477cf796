"""`leansurgeon heads`: how important each attention head is, how many can go, and a checkpoint without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from leansurgeon.cli import common
from leansurgeon.errors import UsageError, short
from leansurgeon.report.places import check_folder


def heads(
    model: common.ModelName,
    data: Annotated[
        str | None,
        typer.Option(
            help="Sample data: text files, a folder of images, task:NAME,key=value; for an encoder with a decoder text "
            "or pairs. Default: the data that a run was trained on."
        ),
    ] = None,
    columns: common.Columns = None,
    classes: common.Classes = None,
    samples: Annotated[int | None, typer.Option(min=2, help="Training samples that importance is taken from.")] = None,
    judge_samples: Annotated[int | None, typer.Option(min=2, help="Held-out samples to judge on, at most.")] = None,
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
        bool,
        typer.Option("--curve/--no-curve", help="Score by the share of heads off, from either end."),
    ] = True,
    steps: Annotated[int, typer.Option(min=1, max=100, help="Steps of the curve.")] = 10,
    prune: Annotated[
        str | None, typer.Option(help="Write the model without so many heads of every layer, such as 40%.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for --prune.")] = None,
    heal: Annotated[
        bool, typer.Option("--heal/--no-heal", help="After --prune, refit output projections on the sample data.")
    ] = True,
    device: common.WhichDevice = "auto",
    plots: Annotated[Path | None, typer.Option(help="Folder for charts as SVG, PNG and PDF.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of samples and probes.")] = 0,
    as_json: common.AsJson = False,
    force: common.Force = False,
    push: common.PushTo = None,
    public: common.Public = False,
    tower: common.WhichTower = None,
    allow_pickle: common.AllowPickle = False,
    skip_damaged: common.SkipDamaged = False,
    trust_remote_code: common.TrustRemoteCode = False,
) -> None:
    """Importance of every head, what its absence costs, and how many heads can go.

    On a run's folder the result is also kept as heads.json in it.
    """
    common.mean(tower)
    from leansurgeon.commands import heads as command

    pruning = command.checked(reduction, normalize, prune, out, heal, force, device)
    if push and pruning is None:
        raise UsageError("--push is for a pruned model.", "Add --prune SHARE -o FOLDER.")
    where = common.destination(push, public=public, force=force)
    if plots is not None:
        check_folder(plots)
    from leansurgeon.measure.heads.document import Options
    from leansurgeon.report.tables.heads import describe

    options = Options(reduction, normalize, ablate, curve, steps, judge_samples, seed)
    limits = {"samples": samples, "columns": columns, "allow_pickle": allow_pickle}
    measured = command.heads(model, data, options, pruning, common.say, **limits)
    document = measured.document
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
        if measured.pruned:
            print(measured.pruned.told())
    for file in files:
        common.say(f"Wrote {file}.")
    if measured.pruned:
        common.pushed(where, measured.pruned.asked.out)
