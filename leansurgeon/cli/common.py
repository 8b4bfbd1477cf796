"""What the commands share: how they talk (stdout is data; this goes to stderr), and whom they trust."""

from __future__ import annotations

from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from leansurgeon.errors import UsageError
from leansurgeon.progress import counted as progress
from leansurgeon.progress import say

__all__ = ["AllowPickle", "Tower", "TrustRemoteCode", "WhichTower", "hold", "let_go", "progress", "say", "seed_list"]


def seed_list(text: str) -> list[int]:
    """`0,1,2` as numbers. Raises `UsageError`."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise UsageError(f"--seeds {text}: whole numbers from 0 on are needed, such as 0,1,2.")
    found = [int(word) for word in words]
    if len(set(found)) < len(found):
        raise UsageError(f"--seeds {text} names a seed twice.")
    return found


def _allow_code(value: bool) -> bool:
    from leansurgeon.checkpoints.foreign import trust

    return trust.allow(value)


_until_the_end = ExitStack()


def hold(folder: Path, *, force: bool) -> None:
    """Refuse an output that is not free, and keep its name for this command until it ends."""
    from leansurgeon.checkpoints.publish.output import held

    _until_the_end.enter_context(held(folder, force=force))


def let_go() -> None:
    """What the command held is free again."""
    _until_the_end.close()


class Tower(StrEnum):
    """The parts of a model of several."""

    text = "text"
    vision = "vision"
    audio = "audio"


WhichTower = Annotated[Tower | None, typer.Option("--tower", help="Which part of a model of several is meant.")]
AllowPickle = Annotated[bool, typer.Option("--allow-pickle", help="Read pickled weights (weights_only=True).")]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        callback=_allow_code,
        help="Run modelling code that comes with a checkpoint. Without it none runs.",
    ),
]
