"""`leansurgeon` as it is typed, in this process: asking a command for something then costs no new import of torch.

What depends on a process of its own (what a command imports, signals, workers) is tested with `subprocess`.
"""

from __future__ import annotations

import io
import sys
from contextlib import chdir, nullcontext, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import typer.main

from leansurgeon.cli.main import main

# Typer makes all commands with all of their options anew for every call, which costs more than most calls here do.
typer.main.get_command = cache(typer.main.get_command)


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def leansurgeon(*arguments: object, cwd: Path | None = None) -> Done:
    """Run a command, in the folder `cwd`. An error that the command does not expect is raised here."""
    out, err = io.StringIO(), io.StringIO()
    argv = mock.patch.object(sys, "argv", ["leansurgeon", *map(str, arguments)])
    place = chdir(cwd) if cwd else nullcontext()
    with argv, place, redirect_stdout(out), redirect_stderr(err):
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
    return Done(code, out.getvalue(), err.getvalue())
