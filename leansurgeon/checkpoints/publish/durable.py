"""Files that are whole or absent, whatever ends the process: written beside their place, synced, renamed.

What a killed process leaves beside a file goes with the next one that is written in its folder.
"""

from __future__ import annotations

import os
from pathlib import Path

from leansurgeon.checkpoints.publish.leftovers import PART, beside, lock, passing, sweep


def write_durably(path: Path, text: str) -> None:
    """Replace `path` by a file with this text, at once."""
    sweep(path.parent)
    aside, handle = beside(path, PART), None
    try:
        with open(aside, "x", encoding="utf-8") as file:
            handle = lock(aside)
            file.write(text)
        sync(aside)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
        if handle is not None:
            os.close(handle)
    sync(path.parent)


def sync(path: Path) -> None:
    """Bring a file or the entries of a folder to the disk; not what is in a scratch folder."""
    if passing(path):
        return
    if os.name != "posix" and path.is_dir():
        return  # Windows opens no folders
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """`sync` of everything in a folder, itself last."""
    for file in folder.rglob("*"):
        sync(file)
    sync(folder)


def give_mode(folder: Path) -> None:
    """Give files the mode that the user's umask asks for; some libraries write weights that only the owner may read."""
    mode = 0o666 & ~umask()
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            file.chmod(mode)


def umask() -> int:
    """This process's umask; Linux says it without the moment in which it is another one for other threads."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("Umask:")), 8)
    except (OSError, StopIteration):
        mask = os.umask(0)
        os.umask(mask)
        return mask
