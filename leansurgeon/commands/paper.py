"""Paper: what the paper prints beside what its words give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from leansurgeon.commands.command import Command
from leansurgeon.progress import Say
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.request import Opt, Request

if TYPE_CHECKING:
    from leansurgeon.paper.document import Exhibits


class PaperRequest(Request):
    """Which tables, and how they are counted."""

    table: Annotated[
        str | None, Opt("1 to 5, fig3, fig4, fig5, fig8, fig9, or all. Default: the five tables.", "Data")
    ] = None
    count: Annotated[
        str, Opt("meta: build each model without memory. formula: by its declaration, without torch, at once.")
    ] = "meta"
    what_if: Annotated[bool, Opt("Each row under both head policies, with and without its narrower MLP.")] = False
    format: Annotated[str, Opt("table, markdown, csv, json or latex.", "Output")] = "table"


@dataclass(frozen=True)
class Audit:
    """Every row of the tables as printed and as counted."""

    exhibits: Exhibits
    request: PaperRequest

    def as_dict(self) -> JsonObject:
        """What --json prints."""
        from leansurgeon.paper.document import document

        return document(self.exhibits, self.request.count)

    def __str__(self) -> str:
        if self.request.format == "json":
            import json

            return json.dumps(self.as_dict())
        if self.request.format == "csv":
            from leansurgeon.paper.document import as_csv

            return as_csv(self.exhibits)
        from leansurgeon.paper.text import render

        return render(self.exhibits, self.request.format, what_if=self.request.what_if)


def paper(request: PaperRequest, say: Say) -> Audit:
    """Every row of the paper's tables: the printed parameters beside ours, and where the saving comes from.

    Accuracy and memory are the paper's own; nothing is trained or measured here.

    Raises `UsageError` for a table or a format that there is not.
    """
    from leansurgeon.report.tables.render import check_format

    check_format(request.format)
    from leansurgeon.paper import chosen
    from leansurgeon.paper.audit import audit

    exhibits = chosen(request.table)
    return Audit([(one, audit(one, request.count, what_if=request.what_if)) for one in exhibits], request)


COMMAND = Command("paper", PaperRequest, paper, ("leansurgeon paper --table 4",))
