"""Diff: compare two models."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from leansurgeon.commands.command import Answer, Command
from leansurgeon.progress import Say
from leansurgeon.request import Access, Opt, SourceName

if TYPE_CHECKING:
    from leansurgeon.checkpoints.diff import Diff as Compared


class DiffRequest(Access):
    """Two models."""

    a: SourceName
    b: Annotated[str, Opt("The other one.", complete="sources", positional=True, model=True)]


@dataclass(frozen=True)
class Diff(Answer):
    """The comparison of two models."""

    found: Compared = field(repr=False, kw_only=True)


def diff(request: DiffRequest, say: Say) -> Diff:
    """Compare shape, parameters, config and every tensor of A and B; layers are matched by surgery.json.

    >>> import leansurgeon
    >>> found = leansurgeon.diff("vit-b", "deit-b").found
    >>> found.a.parameters.total - found.b.parameters.total
    0

    Raises what opening raises.
    """
    from leansurgeon.checkpoints.diff import diff as compare
    from leansurgeon.checkpoints.source import open_source
    from leansurgeon.report.tables.diff import describe

    with ExitStack() as keep:
        names, pickle = (request.a, request.b), request.allow_pickle
        found = compare(*(open_source(name, allow_pickle=pickle, keep=keep) for name in names))
        return Diff({"schema_version": 1, **found.as_dict()}, "\n".join(describe(found)), found=found)


COMMAND = Command("diff", DiffRequest, diff, ("leansurgeon diff vit-b deit-b",), shows=True)
