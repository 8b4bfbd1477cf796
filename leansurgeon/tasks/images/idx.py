"""The idx format of the MNIST family: two zero bytes, a type, the number of dimensions, big-endian sizes, then the
values.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from leansurgeon.errors import UsageError
from leansurgeon.reading import archives, files

_UNSIGNED_BYTE = 0x08
LARGEST = 200_000_000  # bytes; the MNIST family has 47 million


def read(path: Path, dimensions: int) -> np.ndarray:
    """The uint8 array of an idx file, plain or (name ending in .gz) compressed.

    Raises UsageError, in one sentence, for a file that is no idx file, has other dimensions, or is shorter or longer
    than it says.
    """
    data = archives.read_gzip(path, LARGEST) if path.suffix == ".gz" else files.read_bytes(path, LARGEST)
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
