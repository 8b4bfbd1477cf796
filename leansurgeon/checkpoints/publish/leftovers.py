"""What is written beside its place, or for a while, and what killed processes leave of it.

Their names tell who made them, and each is locked while it is in use, so that the next command that writes in the same
folder knows which are dead and takes them away.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from leansurgeon.checkpoints.publish.claim import cut
from leansurgeon.checkpoints.publish.owners import me, of_name
from leansurgeon.checkpoints.publish.rename import rename_new
from leansurgeon.errors import LeanSurgeonError

UNFINISHED, REPLACED, PART = ".unfinished", ".replaced", ".part"  # two folders, and a file
_KINDS = (UNFINISHED, REPLACED, PART)
SCRATCH = "leansurgeon-scratch"
_scratches: dict[Path, int] = {}


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """A new folder beside `path`, gone at the end if it has not been renamed. Raises `OSError`."""
    sweep(path.parent)
    aside = beside(path, UNFINISHED)
    aside.mkdir()
    handle = lock(aside)
    try:
        yield aside
    finally:
        if handle is not None:
            os.close(handle)
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def scratch(place: Path | None = None) -> Iterator[Path]:
    """A folder for as long as the block runs, in the system's temporary folder or in `place`."""
    where = place or Path(tempfile.gettempdir())
    sweep(where)
    folder = where / f"{SCRATCH}{me().tag}"
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise LeanSurgeonError(f"No temporary folder can be made in {where}: {error.strerror}.") from None
    handle = lock(folder)
    _scratches[folder] = os.getpid()
    try:
        yield folder
    finally:
        if handle is not None:
            os.close(handle)
        shutil.rmtree(folder, ignore_errors=True)
        _scratches.pop(folder, None)


def passing(path: Path) -> bool:
    """Whether `path` lies in a scratch folder of this process and goes with it, so that no disk needs to have it."""
    return any(path.is_relative_to(folder) for folder in tuple(_scratches))  # others may come and go meanwhile


@atexit.register
def _take_away() -> None:
    """Scratch folders of something that lives as long as the process; those of its parent are not its own."""
    for folder, owner in tuple(_scratches.items()):
        if owner == os.getpid():
            shutil.rmtree(folder, ignore_errors=True)


def beside(path: Path, kind: str) -> Path:
    """A hidden name beside `path` that tells its kind and the process it belongs to."""
    return path.parent / f".{cut(path.name)}{kind}{me().tag}"


def sweep(folder: Path) -> None:
    """Take away what dead processes have left in `folder`; what one of them had moved out of the way goes back."""
    with suppress(OSError):
        for entry in list(os.scandir(folder)):
            ours = entry.name.startswith(f"{SCRATCH}-") or any(kind in entry.name for kind in _KINDS)
            owner = of_name(entry.name) if ours else None
            if owner is None or not owner.dead:
                continue
            left, is_file = Path(entry.path), entry.is_file(follow_symlinks=False)
            # A link is not ours, and what is locked is of a process whose number is not seen from here.
            if not (is_file or entry.is_dir(follow_symlinks=False)) or in_use(left):
                continue
            if is_file:
                if PART in entry.name:
                    with suppress(OSError):
                        left.unlink()
                continue
            name = entry.name.partition(REPLACED)[0].removeprefix(".")
            if REPLACED in entry.name and cut(name + "-") != name and not (folder / name).exists():
                with suppress(OSError):
                    rename_new(left, folder / name)
                continue
            shutil.rmtree(left, ignore_errors=True)


def lock(folder: Path) -> int | None:
    """A handle that marks the folder (or file) as in use until it is closed; None without locks, or where it is."""
    handle, _ = locked(folder)
    return handle


def in_use(folder: Path) -> bool:
    """Whether another process holds a lock on the folder or file; False where locks cannot be had."""
    handle, taken = locked(folder)
    if handle is not None:
        os.close(handle)
    return taken


def locked(folder: Path) -> tuple[int | None, bool]:
    """A handle that holds the folder's lock, where it can be had; and whether another process has it."""
    try:
        import fcntl

        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except (ImportError, OSError):
        return None, False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        return None, isinstance(error, BlockingIOError)
    return handle, False
