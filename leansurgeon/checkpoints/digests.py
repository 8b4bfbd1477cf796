"""SHA-256 of files, computed in background threads: hashing is CPU-bound, while imports and copies mostly wait.

`early` starts hashing files that `sha256` will be asked for, and cancels what is not needed.
This file uses the standard library only, so that it can start before anything else is imported.
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

CHUNK = 8 << 20  # large, because a thread that releases the GIL may wait 5 ms to get it back
running: dict[Identity, Hashing] = {}


class Hashing(threading.Thread):
    """A thread that computes the digest of one file."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self.path, self.digest, self.wanted = path, None, True
        self.start()

    def run(self) -> None:
        """Hash the file; `digest` stays None if it cannot be read or is no longer wanted."""
        try:
            self.digest = digest(self.path, lambda: self.wanted)
        except OSError:  # `sha256` meets the error again and raises it to its caller
            return


def digest(path: Path, wanted: Callable[[], bool] = lambda: True) -> str:
    """Return the SHA-256 of a file in hex, read in chunks. Raises `InterruptedError` once it is no longer `wanted`."""
    sha = hashlib.sha256()
    # A mapping is returned to the system; memory freed by a thread stays in its heap arena, call after call.
    with path.open("rb", buffering=0) as file, mmap.mmap(-1, CHUNK) as buffer, memoryview(buffer) as view:
        while size := file.readinto(view):
            if not wanted():
                raise InterruptedError
            with view[:size] as read:
                sha.update(read)
    return sha.hexdigest()


@dataclass(frozen=True)
class Identity:
    """A file's identity at one moment: real path, inode number, size, and times of its last write and change (ns)."""

    place: Path
    number: int
    size: int
    written: int
    changed: int  # ctime, which nobody can set back


def identity(path: Path) -> Identity:
    """Return what identifies a file's present state: real path, inode, size and times (ns)."""
    state = path.stat()
    return Identity(path.resolve(), state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)


def has_changed(path: Path, before: Identity) -> bool:
    """Return whether the content of a file may have changed since `before`.

    A new link to the file or another mode does not count if a digest of its earlier state is available for comparison.
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
    """Hash the weights of a folder in the background; do nothing for any other kind of `source`.

    Unfinished hashing is cancelled at the end, for instance after an error: a sparse file may have terabytes.
    """
    begun = begin(source) if source is not None else {}
    try:
        yield
    finally:
        for key, hashing in begun.items():
            hashing.wanted = False
            if running.get(key) is hashing:  # another call may have started its own
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
    """Return the digest of a file, from a background hashing if one was started."""
    key = identity(path)
    begun = running.get(key)
    if begun:
        begun.join()
        if begun.digest and identity(path) == key:
            return begun.digest
    return digest(path)
