"""What the commands share: how they talk (stdout is data; this goes to stderr), and whom they trust."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from leansurgeon.errors import UsageError
from leansurgeon.words import wrap

EVERY = 10.0  # seconds between two lines of progress


def say(text: str) -> None:
    """Talk on stderr, in lines of 80 columns. Of the processes of one training only the first speaks."""
    if os.environ.get("RANK", "0") != "0":
        return
    for line in text.split("\n"):
        print("\n".join(wrap(line, "  ")), file=sys.stderr, flush=True)


def progress(name: str, total: int) -> Callable[[], None]:
    """A line every ten seconds: how far, and about how long still."""
    started, told, done = time.monotonic(), time.monotonic(), 0

    def step() -> None:
        """One more is done; says how far it is every few seconds."""
        nonlocal told, done
        done += 1
        if time.monotonic() - told > EVERY:
            told = time.monotonic()
            left = (told - started) / done * (total - done)
            say(f"{name}: {done} of {total}, about {left:.0f} s left")

    return step


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
