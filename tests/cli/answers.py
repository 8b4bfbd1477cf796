"""Commands as somebody types them, in one line, and what they answer."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from tests.support.command_line import Done, leansurgeon


def typed(line: str, cwd: Path | None = None) -> Done:
    """Run a line."""
    return leansurgeon(*shlex.split(line), cwd=cwd)


def works(line: str, cwd: Path | None = None) -> Done:
    """Run a line that has to end well."""
    done = typed(line, cwd)
    assert done.returncode == 0, done.stderr
    return done


def document(line: str, cwd: Path | None = None) -> dict:
    """The JSON document of a line that has to end well."""
    return json.loads(works(f"{line} --json", cwd).stdout)


def heal(model: Path, data: object, run: Path, more: str = "") -> Done:
    """Train a model for two steps, unless `more` says otherwise."""
    return typed(f"retrain {model} --data {data} -o {run} --set train.duration=2st {more}")


def heals(model: Path, data: object, run: Path, more: str = "") -> Done:
    """The same, which has to end well."""
    done = heal(model, data, run, more)
    assert done.returncode == 0, done.stderr
    return done


def read(file: Path) -> Any:
    """The content of a JSON file."""
    return json.loads(file.read_text())


def stderr_of(done: Done) -> str:
    """The words on stderr, without their line breaks."""
    return " ".join(done.stderr.split())


def stdout_of(done: Done) -> str:
    """The words on stdout, without their line breaks."""
    return " ".join(done.stdout.split())
