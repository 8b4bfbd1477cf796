"""Bytes and text of regular files, up to a limit."""

from __future__ import annotations

import codecs
import errno
import os
import shlex
import stat
from pathlib import Path
from typing import BinaryIO

from leansurgeon.errors import UsageError

KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def in_home(path: str | Path) -> Path:
    """Expand `~` and `~name` in a path; unknown users are left as they are."""
    return Path(os.path.expanduser(path))


LFS = b"version https://git-lfs.github.com/spec/"  # start of a pointer that git leaves without git-lfs


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file without ever blocking (opening a named pipe would). Raises `UsageError` for anything else, or
    if it cannot be opened.
    """
    try:
        # Unbuffered, since Python would stat and read ahead. Links are followed: a hub cache consists of them.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist.") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {why(error)}.") from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        kind = next((name for test, name in KINDS if test(mode)), "no regular file")
        raise UsageError(f"{path} is {kind}, and a file is expected.")
    try:
        is_pointer = os.fstat(handle).st_size < 1024 and os.pread(handle, len(LFS), 0) == LFS
    except OSError as error:  # failing disk
        os.close(handle)
        raise UsageError(f"{path} cannot be read: {why(error)}.") from None
    if is_pointer:
        os.close(handle)
        raise UsageError(
            f"{path} is a Git LFS pointer, not the file itself.",
            f"Fetch it: git -C {shlex.quote(str(path.parent))} lfs pull",
        )
    return os.fdopen(handle, "rb")


def read_bytes(path: Path, limit: int) -> bytes:
    """Return the content of a regular file. Raises `UsageError` if it has more than `limit` bytes."""
    with open_regular(path) as file:
        try:
            size, parts = os.fstat(file.fileno()).st_size, []
            if size <= limit:
                # It may grow, and kernel files report size 0. `read` allocates what it is asked for.
                least, size = max(size + 1, 2**16), 0
                while size <= limit and (part := file.read(min(least, limit + 1 - size))):
                    parts.append(part)
                    size += len(part)
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {why(error)}.") from None
    if size > limit:
        raise UsageError(f"{path} has {size:,} bytes, more than the {limit:,} that such a file may have.")
    return b"".join(parts)


def files_below(folder: Path, depth: int | None = None) -> list[Path]:
    """Return the files in a folder and at most `depth` folders below it, sorted. Skips names that begin with a dot, and
    anything that cannot be accessed or disappears meanwhile. Links to folders are followed only with a `depth`.
    """
    found = []
    for root, folders, names in os.walk(folder, followlinks=depth is not None):
        ends = depth is not None and len(Path(root).relative_to(folder).parts) >= depth
        folders[:] = [] if ends else [name for name in folders if not name.startswith(".")]
        paths = (os.path.join(root, name) for name in names if not name.startswith("."))
        found += [Path(path) for path in paths if os.path.isfile(path)]
    return sorted(found)


def read_text(path: Path, limit: int, *, encoding: str = "utf-8") -> str:
    """Return the text of a UTF-8 file of at most `limit` bytes (`utf-8-sig` skips a byte order mark)."""
    content = read_bytes(path, limit)
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        told = f"{path} is not UTF-8 text: byte {error.start:,} cannot be read."
        raise UsageError(told, as_utf8(path, content)) from None


def as_utf8(path: Path, content: bytes) -> str | None:
    """Return the command that converts a file with this `content` to UTF-8, if its first bytes show its encoding."""
    if not content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return None
    new = path.with_name(f"{path.stem}-utf8{path.suffix}")
    return f"It is UTF-16: iconv -f UTF-16 -t UTF-8 {shlex.quote(str(path))} > {shlex.quote(str(new))}"


def why(error: Exception) -> str:
    """Return the system's reason as the end of a sentence."""
    if isinstance(error, ValueError):  # invalid path
        return "its name holds a NUL character" if "null" in str(error) else "its name cannot be encoded"
    number = getattr(error, "errno", None)
    if number == errno.ENAMETOOLONG:
        return "its name is too long"
    return os.strerror(number).lower() if number else str(error)


def is_name(name: object) -> bool:
    """Return whether a file may refer to its neighbor by this name: one path component that stays in the folder."""
    if not isinstance(name, str) or name in ("", ".", ".."):
        return False
    return encodable(name) and not any(c in "/\\\0" for c in name) and len(os.fsencode(name)) <= 255


def writable(name: str) -> str:
    """Return a file name as writable text: bytes that are not UTF-8 become escapes.

    >>> writable("lean-\\udcff")
    'lean-\\\\udcff'
    """
    return name.encode("utf-8", "backslashreplace").decode()


def encodable(text: str) -> bool:
    """Return whether text can be encoded as UTF-8 (half of a surrogate pair cannot)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
