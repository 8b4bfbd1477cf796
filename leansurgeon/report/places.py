"""Where charts and pages may be written: refused before any work, and before altair is imported."""

from __future__ import annotations

import os
from pathlib import Path

from leansurgeon.errors import UsageError


def check_folder(directory: Path) -> None:
    """Make the folder for pictures. Raises `UsageError` where `directory` is no place for files."""
    above = next(folder for folder in (directory, *directory.parents) if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        why = "cannot be written to" if above.is_dir() else "is a file"
        raise UsageError(f"--plots {directory} cannot be made: {above} {why}.", "Choose another folder.")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--plots {directory} cannot be made: {error.strerror}.", "Choose another folder.") from None


def check_file(path: Path) -> None:
    """Raises `UsageError` where `path` is no place for a page."""
    if path.is_dir():
        raise UsageError(f"--html {path}: that is a folder.", f"Name a file, such as {path / 'report.html'}.")
    if path.exists() and not path.is_file():  # a page that is put in its place would replace /dev/null itself
        raise UsageError(f"--html {path}: that is no ordinary file.", "Name a file, such as report.html.")
    if not path.parent.is_dir():
        raise UsageError(f"--html {path}: there is no folder {path.parent}.", "Make it first, or choose another file.")
