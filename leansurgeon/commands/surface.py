"""What every function of the surface shares: whose code may run, who hears of progress, errors in Python's words."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ParamSpec, TypeVar

from leansurgeon import progress as talk
from leansurgeon.commands import host
from leansurgeon.errors import LeanSurgeonError, UsageError, in_words
from leansurgeon.progress import Say, silent

Progress = bool | Say  # True: lines on stderr; False: silence; or whoever is to be given the lines
Number = int | str | Sequence[int]

P = ParamSpec("P")
T = TypeVar("T")
FLAG = re.compile(r"(?<![\w-])--(no-)?([a-z][a-z0-9-]*)")
# Flags that have another name in Python.
NAMES = {"calibrate": "data", "push": "repo"}


def public(function: Callable[P, T]) -> Callable[P, T]:
    """A function that leaves the process as it was, whose errors are leansurgeon's own and name arguments where the
    command line names flags.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        with own_errors(signature.parameters):
            wish = progress_of(signature, args, kwargs)
            with shown(wish), host.left_alone(speaker(wish)):
                return function(*args, **kwargs)

    return called


@contextmanager
def own_errors(known: Mapping[str, inspect.Parameter]) -> Iterator[None]:
    """Errors are leansurgeon's own, and name arguments where those of the command line name flags."""
    try:
        yield
    except LeanSurgeonError as error:
        error.message, error.hint = in_python(error.message, known), error.hint and in_python(error.hint, known)
        error.args = (error.message,)
        raise
    except OSError as error:
        if said := in_words(error):
            raise said from error
        raise


def in_python(text: str, known: Mapping[str, inspect.Parameter]) -> str:
    """A message of the commands with arguments in place of flags; flags that the function lacks stay.

    >>> def shrink(data=None, force=False, proof=True, out=None): ...
    >>> in_python("Add --calibrate DATA; --no-proof, --force or -o.", inspect.signature(shrink).parameters)
    'Add data=DATA; proof=False, force=True or out=.'
    """

    def argument(flag: re.Match[str]) -> str:
        """The argument that a flag stands for."""
        name = flag[2].replace("-", "_")
        name = name if name in known else NAMES.get(name, name)
        parameter = known.get(name)
        if parameter is None:
            return flag[0]
        return f"{name}={'False' if flag[1] else 'True' if isinstance(parameter.default, bool) else ''}"

    if "private" in known:
        text = text.replace("--public", "private=False")
    said = FLAG.sub(argument, text)
    said = re.sub(r"(?<=\w=) (?=\S)", "", said)  # `data= DATA`
    return re.sub(r"(?<![\w-])-o\b", "out=", said) if "out" in known else said


def speaker(progress: Progress) -> Say:
    """Whoever is told how far the work is. Raises `UsageError` for what is neither a bool nor can be called."""
    if progress is True:
        return talk.say
    if progress is False or progress is None:
        return silent
    if not callable(progress):
        raise UsageError(f"progress={progress!r}: give True, False, or what takes a line of text.")
    return progress


def progress_of(function: inspect.Signature, args: tuple[object, ...], kwargs: dict[str, object]) -> Progress:
    """The `progress` of a call; False for a function without one, and where the call itself will say what is wrong."""
    try:
        given = function.bind(*args, **kwargs)
    except TypeError:
        return False
    given.apply_defaults()
    return given.arguments.get("progress", False)


def shown(wish: Progress) -> AbstractContextManager:
    """Where a call shows how far its work is: stderr, or whoever is told line by line."""
    if wish is True or callable(wish):
        return talk.shown_on(talk.command_screen(None if wish is True else wish))
    return nullcontext()
