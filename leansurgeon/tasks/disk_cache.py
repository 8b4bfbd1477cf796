"""Prepared data on disk: a folder per data set, complete or absent.

An entry is built in a folder of another name and renamed when it is complete, so that a killed program leaves nothing
that a later one would mistake for data. `info.json` is written last and lists the size of every file; an entry that
does not match it is rebuilt.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy import ndarray
from numpy.typing import ArrayLike, DTypeLike

from leansurgeon.errors import LeanSurgeonError, UsageError, raised_as
from leansurgeon.reading import files, jsonfile

Info: TypeAlias = dict[str, Any]  # what the builder of an entry reports; JSON-serialisable
INFO = "info.json"
HASHED = 1 << 30  # bytes; larger files are identified by size and time instead of content
_PARTIAL = ".partial-"
_STALE_SECONDS = 24 * 3600


def entry(cache: Path, name: str, key: dict[str, Any], build: Callable[[Path], Info]) -> Path:
    """Return the folder of data set `name` with this `key`; build it if it is missing.

    The key holds everything that determines the content. `build` fills an empty folder and returns what `read_info`
    shall return. Raises LeanSurgeonError if the disk is full, and UsageError if the cache folder cannot be written.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()  # independent of key order
    folder = cache / f"{name}-{digest[:16]}"
    if _is_whole(folder):
        return folder
    with _writing(cache):
        cache.mkdir(parents=True, exist_ok=True)
        for path in cache.glob(f"{_PARTIAL}*"):  # left by a program killed more than a day ago
            with suppress(FileNotFoundError):  # another process may remove it, too
                if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=cache))
        try:
            info, files = build(partial), {}
            for path in sorted(p for p in partial.rglob("*") if p.is_file()):
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                files[str(path.relative_to(partial))] = path.stat().st_size
            with (partial / INFO).open("w", encoding="utf-8") as file:
                json.dump({**info, "key": key, "files": files}, file, indent=1, sort_keys=True)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.rename(partial, folder)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                if _is_whole(folder):  # another process has created it meanwhile
                    shutil.rmtree(partial, ignore_errors=True)
                else:
                    shutil.rmtree(folder)
                    os.rename(partial, folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return folder


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content as 64 hex digits. Raises UsageError if it cannot be read."""
    with files.open_regular(path) as file:
        try:
            return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:  # a failing disk, or a kernel file that only looks regular
            raise UsageError(f"{path} cannot be read: {files.why(error)}.", "Name another file.") from None


def file_key(path: Path) -> Any:
    """Return a file's cache key: its digest or, for a large one (HASHED), name, size and time."""
    stat = path.stat()
    return file_digest(path) if stat.st_size <= HASHED else [str(path), stat.st_size, stat.st_mtime_ns]


@raised_as(LeanSurgeonError)
def read_info(folder: Path) -> Info:
    """Return what the builder of this entry reported."""
    return jsonfile.read_object(folder / INFO)


class ArrayWriter:
    """Appends 1-dimensional arrays to one `.npy` file of unknown length; `close` completes the header."""

    def __init__(self, path: Path, dtype: DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._file = path.open("wb")
        self.length = 0
        self._write_header()

    def append(self, values: ArrayLike) -> None:
        """Append `values` in the array's dtype."""
        self._file.write(np.ascontiguousarray(values, dtype=self._dtype).data)
        self.length += len(values)

    def close(self) -> None:
        """Write the header with the final length, and close the file."""
        self._file.seek(0)
        self._write_header()
        self._file.close()

    def _write_header(self) -> None:
        # numpy reserves 21 digits for the length, so the header has the same size for any length.
        fields = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, fields)


def name_stretches(sizes: dict[str, int]) -> Info:
    """Describe splits stored one after another in one array: their sizes and first indices."""
    firsts = np.cumsum([0, *sizes.values()])[:-1].tolist()
    return {"sizes": sizes, "first": dict(zip(sizes, firsts, strict=True))}


def starts_of(lengths: ndarray) -> ndarray:
    """Return (N + 1,) int64 starts: sequence i is flat[starts[i] : starts[i + 1]]."""
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def pad_rows(
    flat: ndarray, starts: ndarray, indices_B: ndarray, width: int, pad: int, *, left: bool = False
) -> ndarray:
    """Return the sequences `indices_B` as (B, width) int64 rows, padded with `pad` on the right or `left`.

    No sequence may be longer than `width`.
    """
    rows_BT = np.full((len(indices_B), width), pad, dtype=np.int64)
    for row, index in zip(rows_BT, indices_B, strict=True):
        sequence = flat[starts[index] : starts[index + 1]]
        row[width - len(sequence) if left else 0 :][: len(sequence)] = sequence
    return rows_BT


def lengths_of(starts: ndarray, indices_B: ndarray) -> ndarray:
    """Return the (B,) int64 lengths of these sequences."""
    return np.asarray(starts[indices_B + 1] - starts[indices_B])


def _is_whole(folder: Path) -> bool:
    try:
        files = read_info(folder)["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (LeanSurgeonError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextmanager
def _writing(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = f"No space is left on the disk of the data cache {cache}."
            raise LeanSurgeonError(message, "Free some, or put the cache elsewhere.") from error
        of_the_cache = isinstance(error.filename, str) and Path(error.filename) in (cache, *cache.parents)
        if error.errno in (errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EEXIST) or of_the_cache:
            hint = "LEANSURGEON_CACHE=FOLDER puts it elsewhere."
            raise UsageError(f"The data cache {cache} cannot be written: {error.strerror}.", hint) from error
        raise
