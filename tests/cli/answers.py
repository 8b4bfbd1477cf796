"""What a command answers, for tests that expect it to work."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.command_line import Done, leansurgeon


def works(*words: object, cwd: Path | None = None) -> Done:
    """Run a command that has to end well."""
    done = leansurgeon(*words, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done


def document(*words: object, cwd: Path | None = None) -> dict:
    """The JSON document of a command that has to end well."""
    return json.loads(works(*words, "--json", cwd=cwd).stdout)


def heals(model: Path, data: object, run: Path, *more: object) -> Done:
    """Train for two steps, unless `more` says otherwise, which has to end well."""
    return works("retrain", model, "--data", data, "-o", run, "--set", "train.duration=2st", *more)


def stderr_of(done: Done) -> str:
    """The words on stderr, without their line breaks."""
    return stderr_of(done)


def stdout_of(done: Done) -> str:
    """The words on stdout, without their line breaks."""
    return " ".join(done.stdout.split())
