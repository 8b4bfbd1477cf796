"""`leansurgeon paper`: what the paper prints beside what its words give."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def paper(
    table: Annotated[
        str | None, typer.Option(help="1 to 5, fig3, fig4, fig5, fig8, fig9, or all. Default: the five tables.")
    ] = None,
    count: Annotated[
        str,
        typer.Option(
            help="meta: build each model without memory. formula: by its declaration, without torch, at once."
        ),
    ] = "meta",
    what_if: Annotated[
        bool, typer.Option("--what-if", help="Each row under both head policies, with and without its narrower MLP.")
    ] = False,
    format: Annotated[str, typer.Option(help="table, markdown, csv, json or latex.")] = "table",
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Every row of the paper's tables: the printed parameters beside ours, and where the saving comes from.

    Accuracy and memory are the paper's own; nothing is trained or measured here.
    """
    from leansurgeon.report.tables.table import check_format

    check_format(format)
    from leansurgeon.paper import chosen
    from leansurgeon.paper.audit import audit
    from leansurgeon.paper.document import as_csv, document

    exhibits = [(exhibit, audit(exhibit, count, what_if=what_if)) for exhibit in chosen(table)]
    if as_json or format == "json":
        typer.echo(json.dumps(document(exhibits, count), indent=2, ensure_ascii=False, allow_nan=False))
    elif format == "csv":
        typer.echo(as_csv(exhibits))
    else:
        from leansurgeon.paper.text import render

        typer.echo(render(exhibits, format, what_if=what_if))
