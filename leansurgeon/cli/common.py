"""What the commands share: how they talk (stdout is data; this goes to stderr), and whom they trust."""

from __future__ import annotations

from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from leansurgeon.cli import completion
from leansurgeon.commands import push
from leansurgeon.commands.push import Target
from leansurgeon.errors import UsageError
from leansurgeon.progress import say
from leansurgeon.rank import rank

Columns = Annotated[
    str | None,
    typer.Option(metavar="text=A,label=B", help="Which columns of a table are what, where names do not say."),
]


def seed_list(text: str) -> list[int]:
    """`0,1,2` as numbers. Raises `UsageError`."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise UsageError(f"--seeds {text}: whole numbers from 0 on are needed, such as 0,1,2.")
    seeds = [int(word) for word in words]
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"--seeds {text} names a seed twice.")
    return seeds


def _allow_code(value: bool) -> bool:
    from leansurgeon.checkpoints.foreign import trust

    return trust.allow(value)


def _name_classes(value: str | None) -> str | None:
    from leansurgeon.tasks.classes import naming

    if value is not None:
        _until_the_end.enter_context(naming(value))
    return value


def _skip_damaged(value: bool) -> bool:
    from leansurgeon.reading.images import skipping_damaged

    if value:
        _until_the_end.enter_context(skipping_damaged())
    return value


_until_the_end = ExitStack()


def let_go() -> None:
    """What the command held is free again."""
    _until_the_end.close()


def destination(repo: str | None, *, public: bool, dry_run: bool = False, force: bool = False) -> Target | None:
    """Where --push goes, checked before the work; of the processes of one training the first pushes. Raises
    `UsageError`.
    """
    if (repo is None and not public) or rank() > 0:
        return None
    where = push.target(repo, public=public, dry_run=dry_run, force=force)
    if where is not None:
        push.check(where, say)
    return where


def pushed(where: Target | None, folder: Path) -> None:
    """Push a result that was printed already. Raises `NotPushed`."""
    if where is not None:
        say(f"Pushed: {push.push(folder, where.repo, private=where.private, force=where.force, say=say)}")


class Tower(StrEnum):
    """The parts of a model of several."""

    text = "text"
    vision = "vision"
    audio = "audio"


def mean(tower: Tower | None) -> None:
    """Whatever the command opens from now on, and the processes that it starts, mean this part of a model of several;
    None: nothing is said.
    """
    if tower is not None:
        from leansurgeon.architectures import towers

        towers.choose(tower.value)
        _until_the_end.callback(towers.choose, None)


WhichTower = Annotated[
    Tower | None,
    typer.Option("--tower", help="Which part of a model of several is meant."),
]
# Options that several commands have in the same words.
Heads = Annotated[str | None, typer.Option(help="24, 2x, or one per stage: 16,32,32,32.")]
Layers = Annotated[str | None, typer.Option(help="10, or one per stage: 4,4,8,2.")]
HeadDim = Annotated[
    str, typer.Option(help="keep: inner width grows. split: width // heads. Or a number. auto chooses and says why.")
]
MlpDim = Annotated[str | None, typer.Option(help="Width of the MLP.")]
MlpRatio = Annotated[str | None, typer.Option(help="MLP width as a multiple of width: 2, or one per stage.")]
ClassAttention = Annotated[
    bool, typer.Option("--class-attention", help="Class attention (XCiT, CaiT) gets the same heads; else it stays.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output folder.")]
SourceName = Annotated[
    str, typer.Argument(autocompletion=completion.sources, help="Preset, folder, run, hub id or timm/NAME.")
]
ModelName = Annotated[str, typer.Argument(autocompletion=completion.models, help="Folder, run, hub id or timm/NAME.")]
WhichDevice = Annotated[
    str, typer.Option("--device", help="Where sample data is run: auto takes a GPU if there is one; cpu, cuda:1.")
]
AllowPickle = Annotated[bool, typer.Option("--allow-pickle", help="Read pickled weights (weights_only=True).")]
Classes = Annotated[
    str | None,
    typer.Option(
        "--classes",
        metavar="A,B,C",
        callback=_name_classes,
        help="The data's classes in the order of the model's outputs, where names do not say it; new: other classes.",
    ),
]
SkipDamaged = Annotated[
    bool,
    typer.Option("--skip-damaged", callback=_skip_damaged, help="Leave out, and count, images that cannot be read."),
]
PushTo = Annotated[
    str | None, typer.Option("--push", metavar="ORG/NAME", help="Put the result on the hub, private if new.")
]
Public = Annotated[bool, typer.Option("--public", help="With --push: for everybody to see.")]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        callback=_allow_code,
        help="Run modelling code that comes with a checkpoint. Without it none runs.",
    ),
]
