"""A command is a request and what carries it out; from both comes the function of Python, and in `cli.command` the
command of the terminal.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from leansurgeon import progress as screen
from leansurgeon.commands import host
from leansurgeon.commands.surface import own_errors
from leansurgeon.errors import UsageError
from leansurgeon.progress import Say
from leansurgeon.request import Request, check_request, options_of


class Result(Protocol):
    """What a command gives back: printed it is for a person; `as_dict()` is the document of --json."""

    def as_dict(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Command:
    """`run` carries out a `request`; its docstring is the help of both, up to "Raises" on the command line."""

    name: str
    request: type[Request]
    run: Callable[[Any, Say], Result]
    panel: str
    examples: tuple[str, ...]


@contextmanager
def speaking(progress: bool | Say | None) -> Iterator[Say]:
    """Who is told how far the work is: True means stderr, False nobody, else whoever takes the lines. Raises
    `UsageError` for anything else.
    """
    if progress is False or progress is None:
        yield screen.silent
        return
    if progress is not True and not callable(progress):
        raise UsageError(f"progress={progress!r}: give True, False, or what takes a line of text.")
    with screen.shown_on(screen.command_screen(None if progress is True else progress)):
        yield screen.say if progress is True else progress


@contextmanager
def access_to(request: Request) -> Iterator[None]:
    """While it lasts, code of a checkpoint runs or not and a tower is meant as the request says."""
    from leansurgeon.architectures.towers import meant
    from leansurgeon.checkpoints.foreign import trust

    before = trust.allowed()
    trust.allow(getattr(request, "trust_remote_code", False))
    try:
        with meant(getattr(request, "tower", None)):
            yield
    finally:
        trust.allow(before)


def function_of(command: Command) -> Callable[..., Any]:
    """The function of Python: it takes the fields of the request and `progress`, a model in memory where a field is for
    a model, leaves the process as it was, and raises leansurgeon's own errors.
    """
    request, run = command.request, command.run
    keyword, either = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        inspect.Parameter(
            name,
            either if opt.positional else keyword,
            annotation=field.annotation,
            default=inspect.Parameter.empty if field.is_required() else field.get_default(call_default_factory=True),
        )
        for name, field, opt in options_of(request)
    ]
    parameters.append(inspect.Parameter("progress", keyword, annotation=bool | Say, default=True))
    signature = inspect.Signature(parameters)
    models = [name for name, _, opt in options_of(request) if opt.model]

    @functools.wraps(run)
    def function(*args: Any, **kwargs: Any) -> Any:
        from leansurgeon.commands.in_memory import folder_of

        given = signature.bind(*args, **kwargs).arguments
        with ExitStack() as stack:
            stack.enter_context(own_errors(signature.parameters))
            say = stack.enter_context(speaking(given.pop("progress", True)))
            stack.enter_context(host.left_alone(say))
            for name in models:
                if given.get(name) is not None:
                    given[name] = folder_of(given[name], given.get("tokenizer"), stack)
            asked = check_request(request, given, python=True)
            stack.enter_context(access_to(asked))
            return run(asked, say)

    del function.__wrapped__
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function
