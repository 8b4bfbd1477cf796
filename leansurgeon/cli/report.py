"""`leansurgeon report`: compare runs and models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leansurgeon.cli import completion
from leansurgeon.report.places import check_folder


def report(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            autocompletion=completion.models,
            metavar="[RUN|MODEL ...]",
            help="Runs, shrunk models, or folders of them. Default: all in the workspace.",
        ),
    ] = None,
    format: Annotated[str, typer.Option(help="table, markdown, csv, json or latex.")] = "table",
    wide: Annotated[bool, typer.Option("--wide", help="All columns, however wide.")] = False,
    kappa: Annotated[bool, typer.Option("--kappa", help="Conditioning, one row per layer.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a page with everything, to pass on.")
    ] = None,
    plots: Annotated[Path | None, typer.Option(metavar="DIR", help="Also write charts as SVG, PNG and PDF.")] = None,
    workspace: Annotated[Path, typer.Option(help="Where runs lie.")] = Path("runs"),
    json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Compare runs: task metric, parameters, peak memory, time per step, conditioning.

    Seeds of an experiment become one row with mean and spread, and below stands what may be said about it.
    """
    from leansurgeon.commands import report as command

    if plots is not None:
        check_folder(plots)
    collected = command.report(paths or [], workspace)
    for problem in collected.problems:
        typer.echo(f"skipped: {problem}", err=True)
    text = collected.text("json" if json else format, wide=wide, kappa=kappa)
    if html is not None:
        typer.echo(f"Page: {collected.html(html)}", err=True)
    if plots is not None:
        for path in collected.plots(plots):
            typer.echo(f"Chart: {path}", err=True)
    typer.echo(text)
