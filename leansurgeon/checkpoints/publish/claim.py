"""A writer holds its name while it writes: `.NAME.writing` beside it says who, and is locked as long as that process
lives. The lock tells the truth where file systems have locks; elsewhere the process's number and start do.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from leansurgeon.checkpoints.publish.owners import Owner, me
from leansurgeon.errors import UsageError
from leansurgeon.reading import jsonfile

NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # Windows has none
_held: dict[tuple[Path, int, int], int] = {}  # (name, process, thread) -> how many times over


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Hold the name `path` while the block runs; a thread that holds it may claim it again.

    Raises `UsageError` that says who has it, and `OSError` where nothing can be written beside it.
    """
    path = path.resolve()
    key = (path, os.getpid(), threading.get_ident())
    if key in _held:
        _held[key] += 1
        try:
            yield
        finally:
            _held[key] -= 1
        return
    made = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.parent / f".{cut(path.name)}.writing"
    handle = taken(file, path)
    _held[key] = 1
    try:
        yield
    finally:
        del _held[key]
        with suppress(OSError):
            file.unlink()  # while the lock is held: who waits for it sees that the file is another one
        os.close(handle)
        with suppress(OSError):
            for folder in made:  # unless something has come to lie there
                folder.rmdir()


def cut(name: str) -> str:
    """A name that leaves room for what is put around it."""
    return os.fsdecode(os.fsencode(name)[:150])


def taken(file: Path, path: Path) -> int:
    """The handle of the locked claim file, with its owner written into it."""
    while True:
        # No link is followed: what it leads to would be emptied.
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | NO_LINK, 0o666)
        try:
            if locked(handle, file, path) and is_at(handle, file):
                said = {"where": socket.gethostname(), "since": datetime.now().isoformat(" ", "seconds")}
                os.ftruncate(handle, 0)
                os.pwrite(handle, json.dumps(asdict(me()) | said).encode(), 0)
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its holder has just let go of it and taken the file away


def locked(handle: int, file: Path, path: Path) -> bool:
    """Lock the file. Raises `UsageError` where another process holds it."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locks = True
    except BlockingIOError:
        raise refusal(file, path) from None
    except (ImportError, OSError):
        locks = False
    owner = owner_of(file)
    if owner is None or owner == me() or owner.dead or (locks and owner.boot == me().boot):
        return True
    raise refusal(file, path)


def is_at(handle: int, file: Path) -> bool:
    """Whether the open file is still the one at this path."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(file))
    except FileNotFoundError:
        return False


def owner_of(file: Path) -> Owner | None:
    """The process a claim file names, None where it is broken or empty."""
    said = jsonfile.read_object_if_whole(file) or {}
    try:
        return Owner(str(said["host"]), str(said["boot"]), int(said["pid"]), int(said["start"]))
    except (KeyError, TypeError, ValueError):
        return None


def refusal(file: Path, path: Path) -> UsageError:
    """The error for a folder that another command is writing, with what is known of that one."""
    said = jsonfile.read_object_if_whole(file) or {}
    who = f"process {said.get('pid', '?')} on {said.get('where', '?')}, since {said.get('since', '?')}"
    return UsageError(
        f"{path} is being written by another command: {who}.",
        f"Wait for it, or choose another folder with -o. If it is long over, delete {file}.",
    )
