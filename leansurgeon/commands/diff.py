"""Diff: two models side by side."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from leansurgeon.commands.command import Command
from leansurgeon.progress import Say
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.request import Access, Opt, SourceName

if TYPE_CHECKING:
    from leansurgeon.checkpoints.diff import Diff as Compared


class DiffRequest(Access):
    """Two models."""

    a: SourceName
    b: Annotated[str, Opt("The other one.", complete="sources", positional=True, model=True)]


@dataclass(frozen=True)
class Diff:
    """Two models side by side."""

    found: Compared = field(repr=False)

    def as_dict(self) -> JsonObject:
        """What --json prints."""
        return {"schema_version": 1, **self.found.as_dict()}

    def __str__(self) -> str:
        from leansurgeon.report.tables.diff import describe

        return "\n".join(describe(self.found))


def diff(request: DiffRequest, say: Say) -> Diff:
    """Shape, parameters, config and every tensor of A and B side by side; layers are matched by surgery.json.

    >>> import leansurgeon
    >>> found = leansurgeon.diff("vit-b", "deit-b").found
    >>> found.a.parameters.total - found.b.parameters.total
    0

    Raises what opening raises.
    """
    from leansurgeon.checkpoints.diff import diff as compare
    from leansurgeon.checkpoints.record import shown_if_newer
    from leansurgeon.checkpoints.source import open_source

    with ExitStack() as keep:
        keep.enter_context(shown_if_newer(say))
        names, pickle = (request.a, request.b), request.allow_pickle
        return Diff(compare(*(open_source(name, allow_pickle=pickle, keep=keep) for name in names)))


COMMAND = Command("diff", DiffRequest, diff, ("leansurgeon diff vit-b deit-b",))
