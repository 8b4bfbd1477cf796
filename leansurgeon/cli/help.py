"""Help pages: what people need comes first, rare options last, an example at the end that works as typed.

Options stand in the panels that their requests name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, get_type_hints

import typer

from leansurgeon.errors import readable
from leansurgeon.request import PANELS

if TYPE_CHECKING:
    from rich.console import RenderableType

KINDS = (("Path", "PATH"), ("int", "N"), ("float", "X"), ("str", "TEXT"))


@contextmanager
def in_few_words() -> Iterator[None]:
    """What Typer has against the words of a command, without the whole of a long one."""
    try:
        yield
    except Exception as error:
        if isinstance(message := getattr(error, "message", None), str):
            error.message = readable(message)  # type: ignore[attr-defined]
        raise


class Group(typer.core.TyperGroup):
    """Commands in panels, the most needed first."""

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> tuple[object, ...]:
        """The name of the command that `args` begin with, the command, and the rest."""
        with in_few_words():
            return super().resolve_command(ctx, args)

    def panels(self, ctx: typer.Context) -> dict[str, list[tuple[str, str]]]:
        """Names and first sentences of the commands, panel by panel."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        return {"Commands": [(name, (command.help or "").split("\n\n")[0]) for name, command in commands]}

    def format_help(self, ctx: typer.Context, formatter: object) -> None:
        """Print the page; `formatter`, which would collect plain text, is left empty."""
        from rich.console import Console

        console = Console(highlight=False)
        for part in overview(self, ctx):
            console.print(part)


class Command(typer.core.TyperCommand):
    """A command whose help is laid out in panels, with examples."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """The arguments and options of what was typed."""
        with in_few_words():
            return super().parse_args(ctx, args)

    def format_help(self, ctx: typer.Context, formatter: object) -> None:
        """Print the page; `formatter`, which would collect plain text, is left empty."""
        from rich.console import Console

        console = Console(highlight=False)
        for part in page(self, ctx):
            console.print(part)


def overview(group: Group, ctx: typer.Context) -> Iterator[RenderableType]:
    """Usage, what the program does, its commands panel by panel, its own options, and the epilogue."""
    from rich.padding import Padding
    from rich.text import Text

    yield Text("\n" + group.get_usage(ctx))
    yield Padding(Text(group.help or ""), (1, 2, 0, 2))
    for title, rows in group.panels(ctx).items():
        yield panel(title, rows)
    own = [p for p in group.get_params(ctx) if isinstance(p, typer.core.TyperOption)]
    yield panel("Options", [(spelled(p), said(p)) for p in own])
    if group.epilog:
        yield Padding(Text(group.epilog), (0, 2))
    yield Text("")


def page(command: Command, ctx: typer.Context) -> Iterator[RenderableType]:
    """Usage, what the command does, its arguments and panels of options, and examples."""
    from rich.padding import Padding
    from rich.text import Text

    yield Text("\n" + command.get_usage(ctx))
    for paragraph in (command.help or "").split("\n\n"):
        yield Padding(Text(" ".join(paragraph.split())), (1, 2, 0, 2))
    options: dict[str, list[typer.core.TyperOption]] = {title: [] for title in PANELS}
    arguments, kind = [], kinds(command)
    for param in command.get_params(ctx):
        if isinstance(param, typer.core.TyperArgument):
            arguments.append(param)
        elif not getattr(param, "hidden", False):
            options[getattr(param, "rich_help_panel", None) or PANELS[-1]].append(param)
    if arguments:
        yield panel("Arguments", [((a.name or "").upper(), said(a)) for a in arguments])
    for title, params in options.items():
        if params:
            yield panel(title, [(spelled(p, kind.get(p.name or "", "")), said(p)) for p in params])
    if lines := getattr(command.callback, "examples", ()):
        yield panel("Examples", [(line, "") for line in lines])
    yield Text("")


def panel(title: str, rows: list[tuple[str, str]]) -> RenderableType:
    """Rows of two columns in a frame; a left side that is long takes a line of its own."""
    from rich import box
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    width = min(24, max(len(left) for left, _ in rows))
    if not any(right for _, right in rows):
        body: RenderableType = Text("\n".join(left for left, _ in rows), style="cyan")
    else:
        body = Table.grid(padding=(0, 2))
        body.add_column(width=width, overflow="fold")
        body.add_column()
        for left, right in rows:
            body.add_row(Text(left, style="cyan"), Text(right))
    return Panel(body, title=title, title_align="left", border_style="dim", box=box.ROUNDED)


def spelled(param: typer.core.TyperOption, kind: str = "") -> str:
    """`--out, -o PATH`, `--layers TEXT` or `--heal/--no-heal`."""
    long_first = sorted(param.opts, key=lambda opt: not opt.startswith("--"))
    return f"{'/'.join([', '.join(long_first), *param.secondary_opts])} {kind}".rstrip()


def kinds(command: Command) -> Mapping[str, str]:
    """What a person types after each option, by the name of the parameter; nothing after a flag."""
    hints = get_type_hints(inspect.unwrap(command.callback)) if command.callback else {}
    return {name: next((word for kind, word in KINDS if kind in str(hint)), "") for name, hint in hints.items()}


def said(param: typer.core.TyperOption | typer.core.TyperArgument) -> str:
    """The help of a parameter, and its default where that says something."""
    default, shown = param.default, getattr(param, "show_default", True)
    text = " ".join((param.help or "").split())
    if shown and isinstance(default, (str, int, float)) and not isinstance(default, bool) and str(default):
        text += f" [default: {default}]"
    elif isinstance(default, bool) and getattr(param, "secondary_opts", None):
        text += f" [default: {'yes' if default else 'no'}]"
    return text
