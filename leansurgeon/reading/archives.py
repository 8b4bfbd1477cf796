"""tar archives and gzip files, with a limit on what comes out of them."""

from __future__ import annotations

import gzip
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from leansurgeon.errors import UsageError
from leansurgeon.reading import files

# Long names and the like precede a member's header as a member of their own, which tarfile reads whole, whatever its
# size.
_BEFORE_A_MEMBER = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
_NAMES = 1_000_000  # maximum bytes of one
# What tarfile and the decompressors under it raise for a damaged file.
_DAMAGED = (tarfile.TarError, zlib.error, lzma.LZMAError, OSError, EOFError, ValueError, OverflowError)


class _Header(tarfile.TarInfo):
    """Header of a member; raises `ValueError` if the part before a member is too large."""

    @classmethod
    def frombuf(cls, buf: bytes, encoding: str, errors: str) -> tarfile.TarInfo:
        """Parse the header in a block of 512 bytes."""
        header = super().frombuf(buf, encoding, errors)
        if header.type in _BEFORE_A_MEMBER and header.size > _NAMES:
            raise ValueError(f"a name in it takes {header.size:,} bytes")
        return header


@contextmanager
def _opened(path: Path, kind: str, mode: str) -> Iterator[tarfile.TarFile]:
    """Open an archive; any damage found now or within the context becomes one sentence."""
    try:
        with files.open_regular(path) as file, tarfile.open(fileobj=file, mode=mode, tarinfo=_Header) as tar:
            yield tar
    except _DAMAGED as error:
        raise UsageError(f"{path} is not a readable {kind}: {error}.") from None


def members(path: Path, wanted: Callable[[str], bool], limit: int) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of the regular members of an archive whose name is `wanted`. No member, wanted or not, may
    have more than `limit` bytes: compressed data must be unpacked to get past it.

    Raises UsageError if it is not an archive, or for a larger member.
    """
    with _opened(path, "archive", "r") as tar:
        for member in tar:
            if member.size > limit:
                raise UsageError(
                    f"{path} holds '{member.name}' of {member.size:,} bytes, more than the {limit:,} of such files."
                )
            if member.isfile() and wanted(member.name):
                yield member.name, tar.extractfile(member).read()


def places(path: Path) -> Iterator[tuple[str, int, int, Callable[[int], bytes]]]:
    """Yield (name, first byte, bytes, reader of at most so many bytes) of the regular members of an uncompressed
    archive, whose contents lie in it unchanged.

    Raises UsageError if it is not such an archive.
    """
    with _opened(path, "tar file", "r:") as tar:
        for member in tar:
            if member.isfile() and not member.issparse():
                yield member.name, member.offset_data, member.size, tar.extractfile(member).read


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
