"""A command is a request and the function that carries it out; the Python function and, in `cli.command`, the terminal
command are built from both.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, get_type_hints

from leansurgeon import progress as screen
from leansurgeon.commands.host import leave_process_alone, own_errors
from leansurgeon.errors import UsageError
from leansurgeon.progress import Say
from leansurgeon.rank import rank
from leansurgeon.request import Request, Trust, check_request, options_of


@dataclass(frozen=True)
class Answer:
    """The result of a command: the document of --json, and the same as text."""

    document: Mapping[str, Any] = field(repr=False)
    text: str = field(repr=False)
    exit_code: int = field(default=0, repr=False)

    def as_dict(self) -> Mapping[str, Any]:
        """Return what --json prints."""
        return self.document

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Command:
    """`run` carries out a `request`; its docstring is the help of both, on the command line up to "In Python", an
    example or "Raises". Printing its result is for a person; `as_dict()` is the document of --json.
    """

    name: str
    request: type[Request]
    run: Callable[[Any, Say], Any]
    examples: tuple[str, ...]
    gives_model: bool = False  # a model in memory gives a model, which carries the result
    temporary_out: bool = False  # and without `out`, the result is in a temporary folder
    shows: bool = False  # it writes no model: records of later versions are read as far as possible


@contextmanager
def speaking(progress: bool | Say | None) -> Iterator[Say]:
    """Yield the function that receives progress messages: True means stderr, False none, else the one given. Raises
    `UsageError` for anything else.
    """
    if progress is False or progress is None:
        yield screen.silent
        return
    if progress is not True and not callable(progress):
        raise UsageError(f"progress={progress!r}: give True, False, or a function that takes a line of text.")
    with screen.show_on(screen.command_screen(None if progress is True else progress)):
        yield screen.say if progress is True else progress


@contextmanager
def access_to(command: Command, request: Request, say: Say) -> Iterator[None]:
    """Apply the request's settings inside the context: trusted code, tower, class names, damaged images."""
    with ExitStack() as stack:
        if command.shows:
            from leansurgeon.checkpoints.record import TOLD

            stack.callback(TOLD.reset, TOLD.set(functools.cache(say)))
        if isinstance(request, Trust):
            from leansurgeon.architectures.towers import meant
            from leansurgeon.checkpoints.foreign import trust
            from leansurgeon.reading.images import SKIPS
            from leansurgeon.tasks.classes import NAMED, read_names

            stack.callback(trust.allow, trust.is_allowed())
            trust.allow(request.trust_remote_code)
            stack.enter_context(meant(getattr(request, "tower", None)))
            stack.callback(NAMED.reset, NAMED.set(read_names(getattr(request, "classes", None))))
            if getattr(request, "skip_damaged", False):
                stack.callback(SKIPS.reset, SKIPS.set(True))
        yield


@contextmanager
def pushing(request: Request, say: Say) -> Iterator[Callable[[Any], None]]:
    """Yield a function that pushes a result to the hub, if the request asks for that, in the first process of a
    training.

    Checks the push before the work. Raises `UsageError` and `NotPushed`.
    """
    repo, public = getattr(request, "push", None), getattr(request, "public", False)
    if (repo is None and not public) or rank() > 0:
        yield lambda result: None
        return
    if repo is None:
        raise UsageError("--public is for a push.", "Add --push ORG/NAME.")
    if getattr(request, "dry_run", False) or getattr(request, "eval_only", False):
        raise UsageError("--push and --dry-run exclude each other: a dry run writes nothing.", "Leave one of them out.")
    from leansurgeon.commands import push

    how = {"private": not public, "force": getattr(request, "force", False), "say": say}
    push.check(repo, **how)
    yield lambda result: say(f"Pushed: {push.push(result.folder, repo, **how)}")


def function_of(command: Command) -> Callable[..., Any]:
    """Return the command's Python function: it takes the fields of the request and `progress`, also a model in memory
    where a field is for a model, leaves the process as it was, and raises leansurgeon's own errors.
    """
    request, run = command.request, command.run
    types = get_type_hints(request)  # plain types, without annotations for pydantic and the terminal
    keyword, either = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        inspect.Parameter(
            name,
            either if opt.positional or name == "data" else keyword,
            annotation=types[name],
            default=inspect.Parameter.empty if field.is_required() else field.get_default(call_default_factory=True),
        )
        for name, field, opt in sorted(options_of(request), key=lambda one: (not one[2].positional, one[0] != "data"))
    ]
    models = [name for name, _, opt in options_of(request) if opt.model]
    if models:
        parameters.append(inspect.Parameter("tokenizer", keyword, annotation=object, default=None))
    parameters.append(inspect.Parameter("progress", keyword, annotation=bool | Say, default=True))
    signature = inspect.Signature(parameters)

    @functools.wraps(run)
    def function(*args: Any, **kwargs: Any) -> Any:
        from leansurgeon.commands import in_memory

        given = signature.bind(*args, **kwargs).arguments
        with ExitStack() as stack:
            stack.enter_context(own_errors(signature.parameters))
            say = stack.enter_context(speaking(given.pop("progress", True)))
            stack.enter_context(leave_process_alone(say))
            tokenizer = given.pop("tokenizer", None)
            held = []
            for name in models:
                if not in_memory.is_model(model := given.get(name)):
                    given |= {} if model is None else {name: in_memory.place(model, name)}
                    continue
                held.append(in_memory.write_copy(model, tokenizer))
                given[name] = str(held[-1].folder)
            if held and command.temporary_out and given.get("out") is None:
                held.append(in_memory.Copy())
                given["out"] = held[-1].folder / f"{held[0].folder.name}-lean"
            if not command.gives_model:
                stack.callback(lambda: [copy.close() for copy in held])
            asked = check_request(request, given, python=True)
            stack.enter_context(access_to(command, asked, say))
            with pushing(asked, say) as push:
                result = run(asked, say)
                push(result)
            if not (held and command.gives_model):
                return result
            return in_memory.load_result(replace(result, held=tuple(held)), model)

    del function.__wrapped__
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


class LazyFunction:
    """A Python function whose command is imported at its first use, so that `import leansurgeon` is fast."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    @functools.cached_property
    def _function(self) -> Callable[..., Any]:
        return function_of(importlib.import_module(f"leansurgeon.commands.{self.__name__}").COMMAND)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function)

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self._function.__doc__
