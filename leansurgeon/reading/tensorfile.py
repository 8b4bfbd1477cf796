"""Headers of safetensors files, and the index of shards; only headers are read.

The format is 8 bytes of header length, a JSON header, then the data; see https://github.com/huggingface/safetensors. As
the format requires, gaps, overlaps, and bytes after the last tensor are rejected.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from leansurgeon.errors import UsageError, quote
from leansurgeon.reading import files, jsonfile

# numpy type for the raw bits of each dtype; its last digit is the size in bytes. bf16 and fp8 have no numpy type: their
# bits are handled as integers.
RAW_BITS = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U8": "u1", "U16": "<u2", "U32": "<u4", "U64": "<u8", "BOOL": "u1", "F8_E4M3": "u1", "F8_E5M2": "u1",
}  # fmt: skip
HEADER_LIMIT = 25_000_000  # bytes, of some 300,000 tensors; the format allows 100 million
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Entry:
    """One tensor in a file: its dtype, shape and absolute byte range."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path) -> dict[str, Entry]:
    """Read the entries of one safetensors file. Raises `UsageError` if it is truncated, too long, foreign or
    damaged.
    """
    with files.open_regular(path) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            if len(head) < 8:
                raise UsageError(f"{path.name} has {size} bytes, too few for a safetensors file.", "Fetch it again.")
            (length,) = struct.unpack("<Q", head)
            if length > min(HEADER_LIMIT, size - 8):
                raise UsageError(
                    f"{path.name} is not a safetensors file: its first 8 bytes ask for a header of "
                    f"{length:,} bytes in a file of {size:,}.",
                    "Is it a pickle, or a pointer of Git LFS?",
                )
            content = file.read(length)
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {files.why(error)}.") from None
    header = jsonfile.parse(content, f"The header of {path.name}")
    if not isinstance(header, dict):
        raise UsageError(f"{path.name} is not a safetensors file: its header is {jsonfile.a_kind_of(header)}.")
    header.pop("__metadata__", None)
    base = 8 + length  # start of the data; tensors are contiguous up to the end of the file
    items = {}  # dtype, shape, first and last byte
    for name, item in header.items():
        dtype, shape, offsets = (jsonfile.value_at(item, key) for key in ("dtype", "shape", "data_offsets"))
        if isinstance(dtype, str) and dtype not in RAW_BITS:
            raise UsageError(f"{quote(name)} in {path.name} has the dtype {quote(dtype)}, which is not supported.")
        numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else [None]
        whole = all(type(n) is int and n >= 0 for n in numbers)
        if not (isinstance(dtype, str) and whole and len(offsets) == 2):
            raise UsageError(f"{path.name} is damaged: the entry {quote(name)} of its header cannot be read.")
        items[name] = dtype, tuple(shape), *offsets
    entries, expected = {}, 0
    for name, (dtype, shape, start, end) in sorted(items.items(), key=lambda pair: pair[1][2:]):
        if start != expected or end - start != prod(shape) * int(RAW_BITS[dtype][-1]):
            raise UsageError(
                f"{path.name} is damaged: {quote(name)} ({dtype} {list(shape)}) claims bytes {start}-{end}, "
                f"expected from {expected}."
            )
        entries[name] = Entry(path, dtype, shape, base + start, base + end)
        expected = end
    if base + expected > size:
        raise UsageError(
            f"{path.name} is truncated: its header asks for {base + expected:,} bytes, and the file has {size:,}.",
            "Fetch it again.",
        )
    if base + expected < size:
        raise UsageError(
            f"{path.name} has {size - base - expected:,} bytes behind its last tensor, where a safetensors file ends.",
            "Fetch it again.",
        )
    return entries


def shards(folder: Path) -> list[Path]:
    """Return the shards that the index of a folder names; all must exist next to it."""
    where = jsonfile.read_object(folder / INDEX).get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(name, str) for name in where.values()):
        raise UsageError(f"{INDEX} cannot be read: its weight_map maps no tensors to files.", "Fetch it again.")
    names = sorted(set(where.values()))
    strange = next((name for name in names if not files.is_name(name)), None)
    if strange is not None:
        raise UsageError(f"{INDEX} points outside its folder, to {quote(strange)}.", "Fetch it again.")
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise UsageError(
            f"{len(missing)} of {len(names)} shards are missing, the first is {quote(missing[0])}.", "Fetch it again."
        )
    return [folder / name for name in names]
