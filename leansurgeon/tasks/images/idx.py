"""The idx format of the MNIST family: two zero bytes, a type, the number of dimensions, big-endian sizes, then the
values.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np

from leansurgeon.errors import UsageError

_UNSIGNED_BYTE = 0x08


def read(path: Path, dimensions: int) -> np.ndarray:
    """The uint8 array of an idx file, plain or (name ending in .gz) compressed.

    Raises UsageError, in one sentence, for a file that is no idx file, has other dimensions, or is shorter or longer
    than it says.
    """
    data = _bytes(path)
    if len(data) < 4 or data[:3] != bytes((0, 0, _UNSIGNED_BYTE)):
        raise UsageError(f"{path} is not an idx file of bytes: it begins with {data[:4].hex(' ') or 'nothing'}.")
    if data[3] != dimensions:
        raise UsageError(f"{path} has {data[3]} dimensions where {dimensions} are expected.")
    header = 4 + 4 * dimensions
    if len(data) < header:
        raise UsageError(f"{path} is truncated: {len(data)} bytes are less than its header.")
    shape = struct.unpack(f">{dimensions}I", data[4:header])
    wanted = header + int(np.prod(shape, dtype=object))
    if len(data) != wanted:
        what = "truncated" if len(data) < wanted else "longer than its header says"
        raise UsageError(f"{path} is {what}: {len(data):,} bytes where {wanted:,} are expected.")
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def _bytes(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as file:
            return file.read()
    except EOFError:
        raise UsageError(f"{path} is truncated: its compressed data ends too early.") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise UsageError(f"{path} is not a readable gzip file: {error}.") from None
