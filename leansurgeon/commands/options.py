"""Options that several commands share: data, device, output."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from leansurgeon.commands import in_memory
from leansurgeon.errors import UsageError
from leansurgeon.request import Opt, Request, Trust
from leansurgeon.training.recipe.durations import clock_seconds


def join_words(value: str | Sequence[str] | None) -> str | None:
    """Join several words into one text: ["a", "b"] becomes "a,b"."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(f'"{word}"' if "," in str(word) else str(word) for word in value)
    return value


def spell_share(params: float | str | None) -> str | None:
    """Return a number, or a share between 0 and 1, as text.

    >>> spell_share(0.7), spell_share(60_000_000), spell_share("-30%")
    ('70%', '60000000', '-30%')
    """
    return f"{100 * params:g}%" if isinstance(params, float) and 0 < params < 1 else params and str(params)


def parse_seconds(value: float | str | None, field: ValidationInfo) -> float | None:
    """Return `90s`, `5m`, `1.5h` or a number as seconds. Raises `UsageError`."""
    if value is None or isinstance(value, int | float):
        return value
    seconds = clock_seconds(value)
    if seconds is None:
        flag = f"--{(field.field_name or '').replace('_', '-')}"
        raise UsageError(f"{flag} {value}: a time with its unit is needed, such as 90s or 5m.")
    return seconds


def spell_time(value: float | str | None) -> str | None:
    """Return a time as recipes write it: 90 becomes "90s". Raises `UsageError` if it is not a time."""
    value = f"{value:g}s" if isinstance(value, int | float) else value
    if value is not None and clock_seconds(value) is None:
        raise UsageError(f"--time {value}: a time is needed, such as 90s, 20m or 1.5h.")
    return value


def spell_path(value: str | os.PathLike[str] | None) -> str | None:
    """Return a path as text."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def spell_changes(changes: Mapping[str, object] | Sequence[str]) -> tuple[str, ...]:
    """Return changed keys of a recipe as --set takes them.

    >>> spell_changes({"train.optim.lr": 1e-3, "train.compile": False, "train.duration": "2st"})
    ('train.optim.lr=0.001', 'train.compile=false', 'train.duration=2st')
    """
    if isinstance(changes, str):
        return (changes,)
    if not isinstance(changes, Mapping):
        return tuple(changes)
    return tuple(f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changes.items())


def list_seeds(value: int | str | Sequence[int]) -> tuple[int, ...]:
    """Parse `0,1,2` or numbers into seeds. Raises `UsageError`."""
    if isinstance(value, int):
        return (value,)
    if not isinstance(value, str):
        return tuple(value)
    words = [word.strip() for word in value.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise UsageError(f"--seeds {value}: whole numbers from 0 on are needed, such as 0,1,2.")
    seeds = tuple(map(int, words))
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"--seeds {value} names a seed twice.")
    return seeds


Changes = Annotated[
    tuple[str, ...],
    BeforeValidator(spell_changes),
    Opt("Change a key of the recipe: train.optim.lr=1e-3. Repeatable.", "Data", cli=list[str], metavar="A.B=C"),
]
Workspace = Annotated[Path, Opt("Where models and runs live.", "Output")]
Seed = Annotated[int, Field(ge=0), Opt("Random seed.")]
Force = Annotated[bool, Opt("Replace an existing output folder.", "Output")]
DryRun = Annotated[bool, Opt("Print the plan and write nothing.", "Output")]
# Texts, rows and paths in memory become a name.
Data = Annotated[str, BeforeValidator(lambda value, field: in_memory.data(value, field.field_name or "data"))]
Seconds = Annotated[float, BeforeValidator(parse_seconds)]
Seeds = Annotated[tuple[int, ...], BeforeValidator(list_seeds)]


class ModelRequest(Trust):
    """A checkpoint that may have several towers."""

    tower: Annotated[str | None, Opt("Part of a model with several: text, vision or audio.", "Shape", shown=False)] = (
        None
    )


class DataRequest(ModelRequest):
    """Sample data, and how to read it."""

    data: Annotated[
        Data | None,
        Opt(
            "Your data: text files, a table, a folder of images, or task:NAME,key=value. Default: what a run was "
            "trained on.",
            "Data",
            cli=str,
        ),
    ] = None
    columns: Annotated[
        str | None, Opt("What a table's columns are: text=COLUMN,label=COLUMN. By default their names say it.", "Data")
    ] = None
    classes: Annotated[
        str | None,
        BeforeValidator(join_words),
        Opt(
            "The data's classes in the order of the model's outputs, where names do not say it; new: other classes.",
            "Data",
            metavar="A,B,C",
        ),
    ] = None
    skip_damaged: Annotated[bool, Opt("Skip (and count) images that cannot be read.", "Data", shown=False)] = False


class RecipeRequest(Request):
    """The recipe to train with."""

    recipe: Annotated[
        str | None,
        BeforeValidator(spell_path),
        Opt(
            "Train by a shipped recipe or a file; default: the one of the model's preset.",
            "Data",
            ("--recipe", "-r"),
            complete="recipes",
            cli=str,
        ),
    ] = None
    set: Changes = ()


class LaunchRequest(Request):
    """How many processes each training has."""

    gpus: Annotated[int | None, Field(ge=1), Opt("GPUs of this machine for each training.")] = None
    cpu_processes: Annotated[int | None, Field(ge=1), Opt("CPU processes (gloo) for each training instead.")] = None

    @property
    def processes(self) -> int:
        """How many processes train."""
        return self.gpus or self.cpu_processes or 1

    @property
    def cpu(self) -> bool:
        """Whether to ignore a GPU."""
        return self.cpu_processes is not None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.gpus is not None and self.cpu_processes is not None:
            raise UsageError("--gpus and --cpu-processes exclude each other.")
        return self


class DeviceRequest(Request):
    """The device for computations."""

    device: Annotated[str, Opt("Where sample data is run: auto takes a GPU if there is one; cpu, cuda:1.")] = "auto"


class PushRequest(Request):
    """Whether to push the result to the hub."""

    push: Annotated[str | None, Opt("Put the result on the hub, private if new.", "Output", metavar="ORG/NAME")] = None
    public: Annotated[bool, Opt("With --push: make it public.", "Output", shown=False)] = False
