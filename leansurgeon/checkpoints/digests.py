"""SHA-256 of files, beside other work: hashing is bound by a processor, importing and copying mostly by other things.

`early` starts it for files that `sha256` will be asked for, and ends what nobody asked for.
Standard library only, so that it can begin before anything else is imported.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

CHUNK = 8 << 20  # large, since a thread that lets Python go may wait 5 ms for its turn
running: dict[Identity, Hashing] = {}


class Hashing(threading.Thread):
    """The digest of one file."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self.path, self.digest, self.wanted = path, None, True
        self.start()

    def run(self) -> None:
        """Hash the file; one that cannot be read, or that nobody wants any more, leaves no digest."""
        try:
            self.digest = digest(self.path, lambda: self.wanted)
        except OSError:  # `sha256` meets it again where somebody hears it
            return


def digest(path: Path, wanted: Callable[[], bool] = lambda: True) -> str:
    """SHA-256 of a file in hex, read in chunks. Raises `InterruptedError` where it is not `wanted` to its end."""
    sha = hashlib.sha256()
    # A mapping goes back to the system; what a thread frees stays in its part of the heap, call after call.
    with path.open("rb", buffering=0) as file, mmap.mmap(-1, CHUNK) as buffer, memoryview(buffer) as view:
        while size := file.readinto(view):
            if not wanted():
                raise InterruptedError
            with view[:size] as read:
                sha.update(read)
    return sha.hexdigest()


@dataclass(frozen=True)
class Identity:
    """A file as it was at a moment: its place, number, size, and times of its last writing and change."""

    place: Path
    number: int
    size: int
    written: int
    changed: int  # of what the system keeps of it, too: nobody can set this one back


def identity(path: Path) -> Identity:
    """What tells that a file is still the same: real path, inode, size and times (ns)."""
    state = path.stat()
    return Identity(path.resolve(), state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)


def has_changed(path: Path, before: Identity) -> bool:
    """Whether the content of a file may be another one than it was. A new link to it or another mode is no change
    where a digest of it as it was is at hand.
    """
    try:
        now = identity(path)
    except OSError:
        return True
    if now == before:
        return False
    begun = running.get(before)
    if begun is None or replace(now, changed=before.changed) != before:
        return True
    begun.join()
    return begun.digest is None or digest(path) != begun.digest


@contextmanager
def early(source: str | None) -> Iterator[None]:
    """Hash the weights of a folder meanwhile; whatever else `source` may be, nothing happens. What is not done at the
    end, as after an error, is given up: a sparse file may have terabytes.
    """
    begun = begin(source) if source is not None else {}
    try:
        yield
    finally:
        for key, hashing in begun.items():
            hashing.wanted = False
            if running.get(key) is hashing:  # another call may have begun its own
                del running[key]


def begin(source: str) -> dict[Identity, Hashing]:
    """Start hashing the weights of a folder."""
    folder = Path(os.path.expanduser(source))
    folder = folder if (folder / "config.json").is_file() else folder / "model"
    begun = {}
    for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        if path.is_file():
            begun[identity(path)] = Hashing(path)
    running.update(begun)
    return begun


def sha256(path: Path) -> str:
    """The digest of a file, from a hashing that was begun where there is one."""
    key = identity(path)
    begun = running.get(key)
    if begun:
        begun.join()
        if begun.digest and identity(path) == key:
            return begun.digest
    return digest(path)
