"""SHA-256 of files, beside other work: hashing is bound by a processor, importing and copying mostly by other things.

`begin` starts it early for files that `sha256` will be asked for; the thread ends with the process when nobody asks.
Standard library only, so that it can begin before anything else is imported.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, replace
from pathlib import Path

CHUNK = 8 << 20  # large, since a thread that lets Python go may wait 5 ms for its turn
running: dict[Identity, Hashing] = {}


class Hashing(threading.Thread):
    """The digest of one file."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self.path, self.digest = path, None
        self.start()

    def run(self) -> None:
        """Hash the file; one that cannot be read leaves no digest."""
        try:
            self.digest = digest(self.path)
        except OSError:  # `sha256` meets it again where somebody hears it
            return


def digest(path: Path) -> str:
    """SHA-256 of a file in hex, read in chunks."""
    found, buffer = hashlib.sha256(), bytearray(CHUNK)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            found.update(memoryview(buffer)[:size])
    return found.hexdigest()


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


def changed_since(path: Path, before: Identity) -> bool:
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


def begin(source: str) -> None:
    """Start hashing the weights of a folder; whatever else `source` may be, nothing happens."""
    folder = Path(source).expanduser()
    folder = folder if (folder / "config.json").is_file() else folder / "model"
    for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        if path.is_file():
            running[identity(path)] = Hashing(path)


def sha256(path: Path) -> str:
    """The digest of a file, from a hashing that was begun where there is one."""
    key = identity(path)
    begun = running.get(key)
    if begun:
        begun.join()
        if begun.digest and identity(path) == key:
            return begun.digest
    return digest(path)
