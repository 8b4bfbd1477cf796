"""The command line: registers the commands and turns every expected error into one sentence and an exit code.

Nothing here imports torch; a command imports what it needs when it runs.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any

import typer
import typer.core

import leansurgeon
from leansurgeon import streams
from leansurgeon.cli.command import command_of
from leansurgeon.commands import PANELS
from leansurgeon.errors import (
    Diverged,
    Interrupted,
    LeanSurgeonError,
    Stopped,
    Terminated,
    UsageError,
    disk_is_full,
    in_words,
    quote,
    readable,
)
from leansurgeon.progress import command_screen, show_on
from leansurgeon.rank import is_first_here, rank

EPILOG = (
    "Results go to stdout, progress to stderr. "
    "Exit codes: 0 done, 1 unexpected, 2 usage, 3 model, 4 memory, 5 diverged, "
    "75 stopped by a signal with everything saved, 130 interrupted, 143 terminated."
)


RESUMABLE = {"run": "arms", "search": "tries"}


class Commands(typer.core.TyperGroup):
    """Imports each command when it is needed, and reports Ctrl-C, at which Typer would exit silently."""

    def list_commands(self, ctx: typer.Context) -> list[str]:
        """Return the names of all commands, the most important first."""
        return [name for commands in PANELS.values() for name in commands]

    def get_command(self, ctx: typer.Context, name: str) -> typer.core.TyperCommand | None:
        """Return the command of this name."""
        return load_command(name) if name in self.list_commands(ctx) else None

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:
        """Write the overview, without importing any command."""
        rows = [(panel, name, line) for panel, commands in PANELS.items() for name, line in commands.items()]
        lines = {name: typer.core.TyperCommand(name, help=line, rich_help_panel=panel) for panel, name, line in rows}
        about = {"help": self.help, "epilog": self.epilog, "params": self.params, "commands": lines}
        typer.core.TyperGroup(name=self.name, rich_markup_mode="rich", **about).format_help(ctx, formatter)

    def invoke(self, ctx: typer.Context) -> object:
        """Run the command; system errors (disk full, no permission) become LeanSurgeon's own."""
        try:
            return super().invoke(ctx)
        except OSError as error:
            if said := in_words(error):
                raise said from error
            raise
        except LeanSurgeonError:
            raise
        except Exception as error:  # Typer's own, which may quote a long word in full
            if isinstance(message := getattr(error, "message", None), str):
                error.message = readable(message)  # type: ignore[attr-defined]
            raise
        except KeyboardInterrupt as stop:
            what = RESUMABLE.get(ctx.invoked_subcommand or "")
            kept = f"; finished {what} are kept, run the same command again" if what else ""
            said = Interrupted(f"{'terminated' if isinstance(stop, Terminated) else 'interrupted'}{kept}.")
            said.exit_code = getattr(stop, "exit_code", said.exit_code)
            raise said from stop


@functools.cache
def load_command(name: str) -> typer.core.TyperCommand:
    """Return the command with the options of its request."""
    module = importlib.import_module(f"leansurgeon.{'cli' if name == 'recipes' else 'commands'}.{name}")
    made = module.recipes if name == "recipes" else typer.Typer(add_completion=False)
    if name != "recipes":
        examples = "\n\n".join(("Examples:", *module.COMMAND.examples))
        made.command(name, epilog=examples)(command_of(module.COMMAND))
    return typer.main.get_command(made)


app = typer.Typer(
    name="leansurgeon",
    cls=Commands,
    help="More attention heads, fewer layers: rewrite a transformer, retrain it, and compare honestly.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(value: bool) -> None:
    """Print the version and exit, if the option was given."""
    if value:
        print(leansurgeon.__version__)
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def is_mine_to_say(error: LeanSurgeonError) -> bool:
    """Return whether this process prints the error.

    Under torchrun, rank 0 prints an error that all processes share; each machine prints a usage error once; a process
    prints an error of its own.
    """
    if rank() == 0:
        return True
    if isinstance(error, UsageError):
        return is_first_here()
    return not (error.agreed or isinstance(error, (Stopped, Interrupted, Diverged)))


def main() -> None:
    """Run the command line; always ends with `SystemExit`, except for unexpected errors.

    LEANSURGEON_DEBUG=1 also shows the traceback of expected errors, and lets Python exit normally (for profilers).
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # for this command and the processes that it starts
    with streams.guarding():
        try:
            with sigterm_as_exception(), show_on(command_screen()):  # so that commands remove their temporary folders
                try:
                    for word in sys.argv[1:]:
                        check_encoding(word)
                    app()
                except SystemExit as end:
                    if not end.code:
                        sys.stdout.flush()  # raises now if the disk is full
                    raise
        except LeanSurgeonError as error:
            if os.environ.get("LEANSURGEON_DEBUG"):
                raise
            if is_mine_to_say(error):
                print(f"leansurgeon: {f'process {rank()}: ' if rank() else ''}{error.message}", file=sys.stderr)
                if error.hint:
                    print(f"             {error.hint}", file=sys.stderr)
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            print("leansurgeon: interrupted.", file=sys.stderr)
            sys.exit(130)
        except Exception as error:
            if not disk_is_full(error) or os.environ.get("LEANSURGEON_DEBUG"):
                raise
            told = in_words(error)
            print(f"leansurgeon: {told.message}\n             {told.hint}", file=sys.stderr)
            sys.exit(1)


def check_encoding(word: str) -> None:
    """Raise `UsageError` for a word that cannot be a file name (half of a surrogate pair)."""
    try:
        os.fsencode(word)
    except UnicodeEncodeError:
        raise UsageError(f"{quote(word)} is not valid text in this system's encoding.") from None


@contextmanager
def sigterm_as_exception() -> Iterator[None]:
    """Raise `Terminated` at SIGTERM, so that a training reports what was kept. Processes forked from this one die of
    SIGTERM as usual.
    """
    from leansurgeon.training.processes.signals import handle_signals

    owner = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        """Handle the signal: forked children exit at once, this process raises."""
        if os.getpid() != owner:
            os._exit(Terminated.exit_code)
        raise Terminated

    with handle_signals([signal.SIGTERM], stop):
        yield


if __name__ == "__main__":
    main()
