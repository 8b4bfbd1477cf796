"""Help pages: what people need comes first, rare options last, an example at the end that works as typed.

An option's panel is looked up here by its name, so that a word means the same place in every command.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, get_type_hints

import typer

from leansurgeon.errors import readable

if TYPE_CHECKING:
    from rich.console import RenderableType

PANELS = {
    "Shape": "heads layers head_dim mlp_dim mlp_ratio params memory latency tower class_attention sweep_heads",
    "Data": "data lm_eval limit against columns classes skip_damaged calibrate judge "
    "time recipe sets set train label samples calibration_samples judge_samples",
    "Method": "init method keep more_heads heal heal_time balance uncalibrated prune reduction normalize ablate "
    "curve lora new_tokenizer distill",
    "Output": "out workspace as_json force html plots format dry_run compare proof push public",
}
MORE = "More"
TITLES = (*PANELS, MORE)
PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names.split()}

KINDS = (("Path", "PATH"), ("int", "N"), ("float", "X"), ("str", "TEXT"))

EXAMPLES = {
    "shrink": [
        "leansurgeon shrink digits-vit --heads 8 --layers 3",
        "leansurgeon shrink my-model --layers 24 --calibrate texts/ -o runs/lean",
    ],
    "retrain": [
        "leansurgeon retrain runs/lean --data texts/ --time 20m",
        "leansurgeon retrain runs/digits-vit-h8-l3 --recipe digits-vit",
    ],
    "run": ["leansurgeon run digits-vit", "leansurgeon run digits-vit --seeds 0 --set train.duration=3ep"],
    "search": ["leansurgeon search my-model --params 100M --data texts/"],
    "plan": ["leansurgeon plan vit-b --heads 16 --layers 7 --gpu a100-40"],
    "kappa": ["leansurgeon kappa my-model --data texts/"],
    "heads": ["leansurgeon heads my-model --data texts/ --prune 50% -o runs/pruned"],
    "judge": ["leansurgeon judge runs/lean --data texts/", "leansurgeon judge runs/lean --lm-eval arc_easy,piqa"],
    "list": ["leansurgeon recipes list"],
    "show": ["leansurgeon recipes show digits-vit"],
    "schema": ["leansurgeon recipes schema"],
    "copy": ["leansurgeon recipes copy digits-vit my-recipe.yaml"],
}


# Options that are mere flags here and take a value in another command, and what to say to who gives them one.
PLAIN_FLAGS = {
    "plan": ("--calibrate", "`plan --calibrate` foretells the cost and takes no data; `shrink --calibrate` does."),
}


@contextmanager
def in_few_words(name: str, args: Sequence[str]) -> Iterator[None]:
    """What Typer has against the words after the command `name`, without the whole of a long one."""
    given = list(args)
    try:
        yield
    except Exception as error:
        flag, said = PLAIN_FLAGS.get(name, ("", ""))
        message = getattr(error, "message", None)
        if isinstance(message, str):
            more = f". {said}" if flag in given and "unexpected extra argument" in message else ""
            error.message = readable(message + more)  # type: ignore[attr-defined]
        raise


class Group(typer.core.TyperGroup):
    """Commands in panels, the most needed first."""

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> tuple[object, ...]:
        """The name of the command that `args` begin with, the command, and the rest."""
        with in_few_words("", args):
            return super().resolve_command(ctx, args)

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
        with in_few_words(self.name or "", args):
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
    panels: dict[str, list[tuple[str, str]]] = {}
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        title = getattr(command, "rich_help_panel", None)
        first = " ".join((command.help or "").split("\n\n")[0].split())
        panels.setdefault(title if isinstance(title, str) else "Commands", []).append((name, first))
    for title, rows in panels.items():
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
    options: dict[str, list[typer.core.TyperOption]] = {title: [] for title in TITLES}
    arguments, kind = [], kinds(command)
    for param in command.get_params(ctx):
        if isinstance(param, typer.core.TyperArgument):
            arguments.append(param)
        elif not getattr(param, "hidden", False):
            title = getattr(param, "rich_help_panel", None) or PANEL_OF.get(param.name or "", MORE)
            options[title].append(param)
    if arguments:
        yield panel("Arguments", [((a.name or "").upper(), said(a)) for a in arguments])
    for title, params in options.items():
        if params:
            yield panel(title, [(spelled(p, kind.get(p.name or "", "")), said(p)) for p in params])
    if lines := EXAMPLES.get(command.name or "", getattr(command.callback, "examples", ())):
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
