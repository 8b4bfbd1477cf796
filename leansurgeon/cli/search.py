"""`leansurgeon search`: the best (heads, layers, MLP) of a source under a budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leansurgeon.cli import common, completion
from leansurgeon.errors import short
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.report.places import check_folder
from leansurgeon.words import wrap

if TYPE_CHECKING:
    from leansurgeon.checkpoints.source import Source
    from leansurgeon.commands.search import Searched
    from leansurgeon.search.space import Shapes


def search(
    source: common.SourceName,
    params: Annotated[str | None, typer.Option(help="Most parameters: 60M or 152394.")] = None,
    memory: Annotated[str | None, typer.Option(help="Most memory while training, predicted: 16GB or 16GiB.")] = None,
    latency: Annotated[
        str | None, typer.Option(help="Longest forward pass of one sample, measured on this machine: 5ms.")
    ] = None,
    heads: Annotated[
        str | None, typer.Option(help="Heads to try: 12,16,24 or factors; default 1x,4/3x,3/2x,2x,3x.")
    ] = None,
    layers: Annotated[str | None, typer.Option(help="Layers to try: 6-12; default from all down to a quarter.")] = None,
    mlp_dim: Annotated[
        str | None, typer.Option(help="MLP widths to try: 1536,3072 or factors; default 1x,3/4x,1/2x.")
    ] = None,
    head_dim: Annotated[str, typer.Option(help="keep, split, a number or auto, as in shrink.")] = "auto",
    data: Annotated[
        str | None,
        typer.Option(
            help="Sample data for heals: text files, a folder of images, or task:NAME,key=value. "
            "Default: the data that a run was trained on."
        ),
    ] = None,
    columns: common.Columns = None,
    classes: common.Classes = None,
    calibration_samples: Annotated[int | None, typer.Option(min=2, help="Samples that the last rung fits on.")] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            "-r",
            autocompletion=completion.recipes,
            help="Train candidates by this recipe; default: heal them, or the preset's recipe.",
        ),
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change one key of the recipe. Repeatable.")
    ] = None,
    share: Annotated[float, typer.Option(help="Share of the recipe's length that the last rung trains.")] = 0.25,
    seeds: Annotated[
        str, typer.Option(help="Seeds of every training, whose scores are averaged; a heal has one.")
    ] = "0",
    tries: Annotated[
        int, typer.Option(min=1, help="Candidates of the first rung; each later one has half of them.")
    ] = 8,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples of a step for --memory; default: the recipe's, else 32.")
    ] = None,
    parallel: Annotated[
        int | None, typer.Option(min=1, help="Trainings side by side; default: one per core, or one on a GPU.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the winner to this folder.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Write the winner into the search's folder.")] = False,
    plots: Annotated[Path | None, typer.Option(help="Draw SVG, PNG and PDF into this folder.")] = None,
    workspace: Annotated[Path, typer.Option(help="Where searches, models and runs live.")] = Path("runs"),
    device: common.WhichDevice = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the shapes that fit and try none.")] = False,
    as_json: common.AsJson = False,
    force: Annotated[bool, typer.Option("--force", help="Forget what an earlier call of this search found.")] = False,
    tower: common.WhichTower = None,
    allow_pickle: common.AllowPickle = False,
    skip_damaged: common.SkipDamaged = False,
    trust_remote_code: common.TrustRemoteCode = False,
) -> None:
    """Find the best (heads, layers, MLP) of SOURCE under a budget: count, then try, the better half for twice as long.

    The same command goes on with a search that was ended.
    """
    common.mean(tower)
    from leansurgeon.checkpoints import digests
    from leansurgeon.commands import search as command
    from leansurgeon.search.space import Budget, Space

    budget = Budget.parse(params, memory, latency)
    space = Space(heads, layers, mlp_dim, head_dim)
    asked = command.SearchOptions(
        data=data,
        columns=columns,
        samples=calibration_samples,
        recipe=recipe,
        sets=tuple(sets or ()),
        share=share,
        seeds=tuple(common.seed_list(seeds)),
        tries=tries,
        batch=batch,
        parallel=parallel,
        out=out,
        write=write,
        workspace=workspace,
        force=force,
        allow_pickle=allow_pickle,
        device=device,
    )
    if plots:
        check_folder(plots)
    with digests.early(None if dry_run else source):
        begun = command.begin(source, space, budget, asked)
        if dry_run:
            print(listed(begun.source, begun.shapes, as_json=as_json))
            return
        show(command.search(begun, space, budget, asked, common.say), plots, as_json=as_json)


def listed(opened: Source, shapes: Shapes, *, as_json: bool) -> str:
    """The shapes that fit, for a dry run."""
    from leansurgeon.search import cheap
    from leansurgeon.search.table import candidates_table, space_line

    cheaply = cheap.scores(opened, shapes.candidates, None)
    ranked = cheap.order(shapes.candidates, cheaply)
    if as_json:
        document: JsonObject = {"schema_version": 1, "dry_run": True, "source": opened.name}
        document["space"] = {"shapes": shapes.looked_at, "too_large": shapes.too_large, "refused": shapes.refused}
        candidates = [{"name": c.name, "parameters": c.parameters, "shape": c.shape.as_dict()} for c in ranked]
        return json.dumps(document | {"candidates": candidates})
    name, size = short(opened.name, 60), opened.parameters.total
    lines = [*wrap(f"{name}, {size:,} parameters. {space_line(shapes)}"), "", candidates_table(ranked, cheaply)]
    more = len(ranked) - 20
    return "\n".join([*lines, f"\n{f'... and {more} more. ' if more > 0 else ''}Dry run: nothing was tried."])


def show(outcome: Searched, plots: Path | None, *, as_json: bool) -> None:
    """The outcome as text or as one JSON document, which also lies in the search's folder."""
    from leansurgeon.commands.search import DOCUMENT
    from leansurgeon.training.runs.folder import write_json

    document = outcome.as_dict()
    if plots:
        from leansurgeon.search import plots as drawing

        document["plots"] = [str(file) for file in drawing.draw(outcome.outcome, plots)]
        write_json(outcome.folder / DOCUMENT, document)
    print(json.dumps(document) if as_json else outcome)
