"""`leansurgeon diff`: two models side by side."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from leansurgeon.cli import completion
from leansurgeon.cli.common import AllowPickle, AsJson, SourceName, TrustRemoteCode


def diff(
    a: SourceName,
    b: Annotated[str, typer.Argument(autocompletion=completion.sources, help="The other one.", show_default=False)],
    as_json: AsJson = False,
    allow_pickle: AllowPickle = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Shape, parameters, config and every tensor of A and B side by side; layers matched by surgery.json."""
    from contextlib import ExitStack

    from leansurgeon.checkpoints.diff import diff as compare
    from leansurgeon.checkpoints.source import open_source
    from leansurgeon.report.tables.diff import describe

    with ExitStack() as keep:
        sources = [open_source(name, allow_pickle=allow_pickle, keep=keep) for name in (a, b)]
        differences = compare(*sources)
    if as_json:
        print(json.dumps({"schema_version": 1, **differences.as_dict()}))
    else:
        print("\n".join(describe(differences)))
