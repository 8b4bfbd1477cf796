"""`leansurgeon diff`: two models side by side."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Annotated

import typer

from leansurgeon.cli import completion
from leansurgeon.cli.common import AllowPickle, AsJson, SourceName, TrustRemoteCode


def diff(
    a: SourceName,
    b: Annotated[str, typer.Argument(autocompletion=completion.sources, help="The other one.")],
    as_json: AsJson = False,
    allow_pickle: AllowPickle = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Shape, parameters, config and every tensor of A and B side by side; layers matched by surgery.json."""
    from leansurgeon.api.results import Diff
    from leansurgeon.checkpoints.diff import diff as compare
    from leansurgeon.checkpoints.source import open_source

    with ExitStack() as keep:
        differences = Diff(compare(*(open_source(name, allow_pickle=allow_pickle, keep=keep) for name in (a, b))))
    print(json.dumps(differences.as_dict()) if as_json else differences)
