"""Renames of folders that do not replace, and that exchange two at once, where the system has them."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

NEW, SWAP = 1, 2  # RENAME_NOREPLACE and RENAME_EXCHANGE of Linux
_CURRENT = -100  # AT_FDCWD
_LACKING = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


@cache
def _system() -> Callable[[bytes, bytes, int], int] | None:
    """The system's own call, as a function of two names and a flag; None where there is none."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
        if sys.platform == "darwin":
            call, flags = library.renamex_np, {NEW: 4, SWAP: 2}
            return lambda old, new, flag: call(old, new, ctypes.c_uint(flags[flag]))
        call = library.renameat2
        return lambda old, new, flag: call(_CURRENT, old, _CURRENT, new, ctypes.c_uint(flag))
    except (OSError, AttributeError, TypeError):
        return None


def _asked(old: Path, new: Path, flag: int) -> bool:
    """Whether the system did it; False where it cannot. Raises `OSError`."""
    call = _system()
    if call is None:
        return False
    if call(os.fsencode(old), os.fsencode(new), flag) == 0:
        return True
    number = ctypes.get_errno()
    if number in _LACKING:
        return False
    raise OSError(number, os.strerror(number), str(old), None, str(new))


def rename_new(old: Path, new: Path) -> None:
    """Rename a folder to a name that is free. Raises `FileExistsError` where it is not, whoever took it and when."""
    if _asked(old, new, NEW):
        return
    if os.name == "nt":
        os.rename(old, new)  # refuses what exists
        return
    os.mkdir(new)  # takes the name or fails, and a folder may be renamed to an empty one
    try:
        os.rename(old, new)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new)) from None
        os.rmdir(new)
        raise


def exchange(one: Path, other: Path) -> bool:
    """Let two folders change places at once; False where the system cannot. Raises `OSError`."""
    return _asked(one, other, SWAP)
