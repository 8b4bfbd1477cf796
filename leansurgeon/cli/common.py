"""What the commands share: how they talk (stdout is data; this goes to stderr), and whom they trust."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from leansurgeon.words import wrap


def say(text: str) -> None:
    """Talk on stderr, in lines of 80 columns. Of the processes of one training only the first speaks."""
    if os.environ.get("RANK", "0") != "0":
        return
    for line in text.split("\n"):
        print("\n".join(wrap(line, "  ")), file=sys.stderr, flush=True)


def _allow_code(value: bool) -> bool:
    from leansurgeon.checkpoints import trust

    return trust.allow(value)


_until_the_end = ExitStack()


def hold(folder: Path, *, force: bool) -> None:
    """Refuse an output that is not free, and keep its name for this command until it ends."""
    from leansurgeon.checkpoints.output import held

    _until_the_end.enter_context(held(folder, force=force))


def let_go() -> None:
    """What the command held is free again."""
    _until_the_end.close()


AllowPickle = Annotated[bool, typer.Option("--allow-pickle", help="Read pickled weights (weights_only=True).")]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        callback=_allow_code,
        help="Run modelling code that comes with a checkpoint. Without it none runs.",
    ),
]
