"""The definition of each option, once for all. A request is a pydantic type; its fields define both the options of the
command line (`cli.command`) and the arguments of the Python function (`commands.command`), so both accept the same
words and report errors alike.
"""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from leansurgeon.errors import LeanSurgeonError, UsageError, did_you_mean, quote

PANELS = ("Shape", "Data", "Method", "Output", "More")  # of a help page, in this order

# Options that apply to one call only.
ONCE = {"force", "push", "public", "resume", "dry_run", "arms", "parallel", "gpus", "cpu_processes"}


class Opt(NamedTuple):
    """What the command line needs of a field besides its type, default and constraints."""

    help: str
    panel: str = "More"
    names: tuple[str, ...] = ()  # spellings if they differ from the field's name: "--out", "-o"
    cli: Any = None  # the type that Typer reads, if the field takes more in Python
    metavar: str | None = None
    complete: str | None = None  # tab completion: a function of `cli.completion`
    positional: bool = False
    shown: bool = True  # in --help; False for options that an error message names, or that only measurements need
    model: bool = False  # in Python also a model in memory, written to a folder while the command runs


class Names(tuple[str, ...]):
    """The values of an option that was given several times."""


class Request(BaseModel):
    """The arguments of a command; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class Trust(Request):
    """Whether code of a checkpoint may run."""

    trust_remote_code: Annotated[bool, Opt("Run modelling code that comes with a checkpoint.", shown=False)] = False


class Access(Trust):
    """Also, what may be read of a checkpoint."""

    allow_pickle: Annotated[bool, Opt("Read pickled weights (weights_only=True).", shown=False)] = False


def spell_number(value: float | str | Sequence[float] | None) -> str | None:
    """Return numbers, words, or one number for each stage as text: 24, "2x" and [16, 32] become "24", "2x" and "16,32".

    >>> spell_number([16, 32]), spell_number("2x"), spell_number(0.5)
    ('16,32', '2x', '0.5')
    """
    if value is None or isinstance(value, str):
        return value
    several = list(value) if isinstance(value, Sequence) else [value]
    if not several or any(isinstance(one, bool) or not isinstance(one, int | float) for one in several):
        raise ValueError("give a number, a word such as '2x', or one number for each stage")
    return ",".join(f"{one:g}" if isinstance(one, float) else str(one) for one in several)


SourceName = Annotated[
    str, Opt("Preset, folder, run, hub id or timm/NAME.", complete="sources", positional=True, model=True)
]
ModelName = Annotated[str, Opt("Folder, run, hub id or timm/NAME.", positional=True, model=True)]
Number = Annotated[str, BeforeValidator(spell_number)]  # 24, "2x", or one for each stage


class ShapeRequest(Request):
    """The wanted shape of a model."""

    heads: Annotated[Number | None, Opt("24, 2x, or one per stage: 16,32,32,32.", "Shape", cli=str)] = None
    layers: Annotated[Number | None, Opt("10, or one per stage: 4,4,8,2.", "Shape", cli=str)] = None
    head_dim: Annotated[
        Number,
        Opt(
            "keep: inner width grows. split: width // heads. Or a number. auto chooses and says why.", "Shape", cli=str
        ),
    ] = "auto"
    mlp_dim: Annotated[Number | None, Opt("Width of the MLP.", "Shape", cli=str)] = None
    class_attention: Annotated[
        bool, Opt("Class attention (XCiT, CaiT) gets the same heads; else it stays.", "Shape")
    ] = False


R = TypeVar("R", bound=Request)


def options_of(request: type[Request]) -> list[tuple[str, FieldInfo, Opt]]:
    """Return every field with its options for the command line, panel by panel: shared options come first under Shape
    and Data, and last elsewhere.
    """
    places: dict[str, list[tuple[int, int]]] = {}  # (class from the request upwards, place in it), for each definition
    for level, base in enumerate(request.__mro__):
        for place, name in enumerate(inspect.get_annotations(base)):
            places.setdefault(name, []).append((level, place))

    def order(one: tuple[str, FieldInfo, Opt]) -> tuple[int, int, int]:
        """Return the panel, and the place in it."""
        name, _, opt = one
        panel = -1 if opt.positional else PANELS.index(opt.panel)
        level, place = places[name][-1 if opt.panel in ("Shape", "Data") else 0]
        return panel, -level if opt.panel in ("Shape", "Data") else level, place

    fields = request.model_fields.items()
    found = [(name, field, next(m for m in field.metadata if isinstance(m, Opt))) for name, field in fields]
    return sorted(found, key=order)


def command_line(name: str, asked: Request) -> str:
    """Return the command line for a request: the non-default options in the order of its help, without
    those in `ONCE`.
    """
    words = ["leansurgeon", name]
    for key, field, opt in options_of(type(asked)):
        value = getattr(asked, key)
        if key in ONCE or value == field.get_default(call_default_factory=True):
            continue
        flag = opt.names[0] if opt.names else f"--{key.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag.split("/")[not value])
            continue
        several = value if isinstance(value, list | tuple) else [f"{value:g}s" if isinstance(value, float) else value]
        if opt.cli is str and several is value:
            several = [",".join(map(str, value))]
        words += [word for one in several for word in (*([] if opt.positional else [flag]), str(one))]
    return shlex.join(words)


def check_request(request: type[R], given: Mapping[str, Any], *, python: bool = False) -> R:
    """Return the request with these values.

    Raises `UsageError` for the first unknown or invalid one, spelled as the caller wrote it: `--heal-time 90s`, in
    Python `heal_time='90s'`.
    """
    try:
        return request(**given)
    except ValidationError as error:
        fault = error.errors()[0]
        name = str(fault["loc"][0]) if fault["loc"] else ""
        if fault["type"] == "extra_forbidden":
            raise UsageError(f"There is no option '{name}'{did_you_mean(name, request.model_fields)}.") from None
        cause = fault.get("ctx", {}).get("error")
        if isinstance(cause, LeanSurgeonError):
            raise cause from None
        said = str(cause) if cause else fault["msg"][:1].lower() + fault["msg"][1:]
        if fault["type"] == "literal_error":
            said = f"give one of {fault['ctx']['expected'].replace(chr(39), '').replace(' or ', ', ')}"
        value = quote(fault["input"])
        flag = f"{name}={value}: " if python else f"--{name.replace('_', '-')} {fault['input']}: "
        raise UsageError(f"{flag if name else ''}{said.rstrip('.')}.") from None
