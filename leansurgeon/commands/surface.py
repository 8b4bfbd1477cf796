"""Functions and methods for Python: the process is left as it was, and errors speak of arguments instead of flags."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from leansurgeon.commands import host
from leansurgeon.errors import LeanSurgeonError, in_words
from leansurgeon.progress import silent

P = ParamSpec("P")
T = TypeVar("T")
FLAG = re.compile(r"(?<![\w-])--(no-)?([a-z][a-z0-9-]*)")
# Flags that have another name in Python.
NAMES = {"calibrate": "data", "push": "repo"}


def public(function: Callable[P, T]) -> Callable[P, T]:
    """A function that leaves the process as it was, whose errors are leansurgeon's own and name arguments where the
    command line names flags.
    """
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        with own_errors(known), host.left_alone(silent):
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
