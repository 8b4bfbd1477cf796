"""tar archives and gzip files."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from leansurgeon.errors import UsageError
from leansurgeon.reading import files


def places(path: Path) -> Iterator[tuple[str, int, int, Callable[[int], bytes]]]:
    """Yield (name, first byte, bytes, reader of at most so many bytes) of the regular members of an uncompressed
    archive, whose contents lie in it unchanged.

    Raises UsageError if it is not such an archive.
    """
    try:
        with files.open_regular(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if member.isfile() and not member.issparse():
                    yield member.name, member.offset_data, member.size, tar.extractfile(member).read
    except (tarfile.TarError, OSError, ValueError) as error:
        raise UsageError(f"{path} is not a readable tar file: {error}.") from None


def read_gzip(path: Path, limit: int) -> bytes:
    """Return the uncompressed content of a gzip file.

    Raises UsageError if it has more than `limit` bytes, or is not gzip.
    """
    try:
        with files.open_regular(path) as file, gzip.open(file) as unpacked:
            content = unpacked.read(limit + 1)
    except EOFError:
        raise UsageError(f"{path} is truncated: its compressed data ends too early.") from None
    except (gzip.BadGzipFile, zlib.error, OSError) as error:
        raise UsageError(f"{path} is not a readable gzip file: {error}.") from None
    if len(content) > limit:
        raise UsageError(f"{path} holds more than {limit:,} bytes.")
    return content
