"""Build the terminal command of a request: its fields become Typer options."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from typing import Annotated, Any

import typer

from leansurgeon.cli import completion
from leansurgeon.commands.command import Command, access_to, pushing
from leansurgeon.errors import UsageError
from leansurgeon.progress import say
from leansurgeon.rank import is_worker, rank
from leansurgeon.request import PANELS, Names, check_request, options_of

METAVARS = (("bool", ""), ("Path", "PATH"), ("int", "N"), ("float", "X"), ("str", "TEXT"))
KEYWORD = inspect.Parameter.KEYWORD_ONLY


def command_of(command: Command) -> Callable[..., None]:
    """Return what Typer calls: it takes every field of the request as an argument or option, and --json."""
    parameters = []
    for name, field, opt in options_of(command.request):
        default = inspect.Parameter.empty if field.is_required() else field.get_default(call_default_factory=True)
        said = {"help": opt.help, "metavar": opt.metavar}
        said["autocompletion"] = getattr(completion, opt.complete) if opt.complete else None
        if opt.positional:
            made = typer.Argument(**said)
            opt = opt._replace(metavar=opt.metavar or name.upper())
        else:
            spelled = opt.names or (f"--{name.replace('_', '-')}",)
            made = typer.Option(*spelled, rich_help_panel=opt.panel, hidden=not opt.shown, **said)
        kind = field.annotation
        if opt.cli:  # the request parses what Typer reads, the default too
            default = None if default in (None, ()) else default
            kind = opt.cli | None if default is None else opt.cli
            default = ",".join(map(str, default)) if isinstance(default, tuple) else default
        made.metavar = opt.metavar or next((word for part, word in METAVARS if part in str(kind)), "")
        parameters.append(inspect.Parameter(name, KEYWORD, annotation=Annotated[kind, made], default=default))
    as_json = typer.Option("--json", metavar="", help="Print one JSON document.", rich_help_panel="Output")
    made = inspect.Parameter("as_json", KEYWORD, annotation=Annotated[bool, as_json], default=False)
    last = sum(opt.panel == PANELS[-1] and not opt.positional for *_, opt in options_of(command.request))
    parameters.insert(len(parameters) - last, made)  # before the options of the last panel

    def callback(**given: Any) -> None:
        as_json = given.pop("as_json")
        given = {name: value for name, value in given.items() if value is not None}  # None: the request's default
        given |= {name: Names(value) for name, value in given.items() if isinstance(value, list)}
        asked = check_request(command.request, given)
        if as_json and (form := getattr(asked, "format", "json")) not in ("table", "json"):
            raise UsageError(f"--json and --format {form} exclude each other.", "Leave one of them out.")
        with access_to(command, asked, say), pushing(asked, say) as push:
            result = command.run(asked, say)
            if is_worker() and rank() > 0:
                return
            print(json.dumps(result.as_dict()) if as_json else result, flush=True)
            push(result)
        if code := getattr(result, "exit_code", 0):
            raise typer.Exit(code)

    callback.__name__ = command.name
    callback.__doc__ = re.split(r"\n\n(?:In Python|>>>|Raises)", inspect.cleandoc(command.run.__doc__ or ""))[0]
    callback.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    callback.__annotations__ = {one.name: one.annotation for one in parameters}
    return callback
