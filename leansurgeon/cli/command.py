"""The command of the terminal that belongs to a request: Typer's options from its fields."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Annotated, Any

import typer

from leansurgeon.cli import completion
from leansurgeon.commands.command import Command, access_to
from leansurgeon.progress import say
from leansurgeon.request import check_request, options_of


def command_of(command: Command) -> Callable[..., None]:
    """What Typer calls: it takes every field of the request as an argument or option, and --json."""
    parameters = []
    for name, field, opt in options_of(command.request):
        default = inspect.Parameter.empty if field.is_required() else field.get_default(call_default_factory=True)
        said = {"help": opt.help, "metavar": opt.metavar}
        said["autocompletion"] = getattr(completion, opt.complete) if opt.complete else None
        if opt.positional:
            made = typer.Argument(**said)
        else:
            spelled = opt.names or (f"--{name.replace('_', '-')}",)
            made = typer.Option(*spelled, rich_help_panel=opt.panel, **said)
        kind = (opt.cli if default is not None else opt.cli | None) if opt.cli else field.annotation
        parameters.append(parameter(name, Annotated[kind, made], default))
    as_json = typer.Option("--json", help="Print one JSON document.", rich_help_panel="Output")
    parameters.append(parameter("as_json", Annotated[bool, as_json], False))

    def callback(**given: Any) -> None:
        as_json = given.pop("as_json")
        asked = check_request(command.request, given)
        with access_to(asked):
            result = command.run(asked, say)
        print(json.dumps(result.as_dict()) if as_json else result)
        if code := getattr(result, "exit_code", 0):
            raise typer.Exit(code)

    callback.__name__ = command.name
    callback.__doc__ = inspect.cleandoc(command.run.__doc__ or "").split("\n\nRaises")[0].split("\n\n>>>")[0]
    callback.examples = command.examples  # type: ignore[attr-defined]
    callback.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    callback.__annotations__ = {one.name: one.annotation for one in parameters}
    return callback


def parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    """A parameter that is given by name."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)
