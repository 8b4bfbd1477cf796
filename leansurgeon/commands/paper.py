"""Paper: the paper's tables beside our own counts."""

from __future__ import annotations

from typing import Annotated

from leansurgeon.commands.command import Answer, Command
from leansurgeon.progress import Say
from leansurgeon.request import Opt, Request


class PaperRequest(Request):
    """Which tables."""

    table: Annotated[
        str | None, Opt("1 to 5, fig3, fig4, fig5, fig8, fig9, or all. Default: the five tables.", "Data")
    ] = None


def paper(request: PaperRequest, say: Say) -> Answer:
    """Show every row of the paper's tables: the printed parameters beside ours, and where the saving comes from.

    Accuracy and memory are the paper's own; nothing is trained or measured here.

    Raises `UsageError` for an unknown table.
    """
    from leansurgeon.paper import choose_exhibits
    from leansurgeon.paper.audit import audit
    from leansurgeon.paper.output import document, render

    exhibits = [(one, audit(one)) for one in choose_exhibits(request.table)]
    return Answer(document(exhibits), render(exhibits))


COMMAND = Command("paper", PaperRequest, paper, ("leansurgeon paper --table 4",))
