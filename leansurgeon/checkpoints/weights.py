"""Read and write safetensors files without torch: headers, byte ranges, numpy tensors.

The format is 8 bytes of header length, a JSON header, then the data; see https://github.com/huggingface/safetensors.
After the header only the needed bytes are read, and unchanged tensors are copied by the kernel, so a shrink is
disk-bound.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TypeAlias

import numpy as np

from leansurgeon.checkpoints.publish.durable import sync
from leansurgeon.errors import LeanSurgeonError, UnsupportedModel, disk_is_full, quote, raised_as
from leansurgeon.reading.tensorfile import INDEX, RAW_BITS, Entry, read_header, shards

Arrays: TypeAlias = dict[str, np.ndarray]  # tensor name -> values

RAW = {name: np.dtype(bits) for name, bits in RAW_BITS.items()}
FLOATS = ("F64", "F32", "F16", "BF16")
CHUNK = 16 << 20
SHARD_BYTES = 5_000_000_000  # as in transformers


class Weights:
    """The tensors of a checkpoint folder, in one file or several shards; data are read on demand."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.entries = dict(entries)

    @classmethod
    @raised_as(UnsupportedModel)
    def open(cls, folder: Path) -> Weights:
        """Open `model.safetensors`, or the shards listed in `model.safetensors.index.json`."""
        single, index = folder / "model.safetensors", folder / INDEX
        if single.exists():
            return cls(read_header(single))
        if index.exists():
            entries = {}
            for shard in shards(folder):
                header = read_header(shard)
                if twice := next((name for name in header if name in entries), None):
                    raise UnsupportedModel(
                        f"{quote(twice)} lies in {entries[twice].file.name} and in {shard.name}, so it is "
                        "unclear which one counts.",
                        "Download the model again, or save it again.",
                    )
                entries |= header
            return cls(entries)
        there = sorted(file.name for file in folder.glob("*.safetensors") if "adapter" not in file.name)
        if len(there) == 1:
            said = f"The weights in {folder} are named {quote(there[0])}, a name that no library looks for."
            raise UnsupportedModel(said, "Rename the file to model.safetensors.")
        if there:
            raise UnsupportedModel(
                f"{folder} has {len(there)} files of weights ({quote(there[0])} and others) and no {INDEX} to "
                "say which file holds what.",
                f"Fetch {INDEX} as well.",
            )
        raise UnsupportedModel(
            f"There is no model.safetensors in {folder}.", "A folder needs config.json and safetensors weights."
        )

    def rename_endings(self, endings: Mapping[str, str]) -> Weights:
        """Return the same tensors with old name endings (`LayerNorm.gamma`) replaced by today's."""

        def today(name: str) -> str:
            """Return a tensor's name with the ending that the library uses today."""
            old = next((e for e in endings if name.endswith(e)), None)
            return name.removesuffix(old) + endings[old] if old else name

        return Weights({today(name): entry for name, entry in self.entries.items()}) if endings else self

    @property
    def files(self) -> list[Path]:
        """The files that hold the tensors, each once, sorted."""
        return sorted({entry.file for entry in self.entries.values()})

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor, from the files' headers."""
        return {name: entry.shape for name, entry in self.entries.items()}

    def raw(self, name: str) -> np.ndarray:
        """Return the bits of a tensor in the numpy type of `RAW` (bf16 as uint16)."""
        return bits(self.entries[name])

    def float32(self, name: str) -> np.ndarray:
        """Return a floating-point tensor as float32."""
        return to_float32(self.raw(name), self.entries[name].dtype)

    def finite(self, name: str) -> bool:
        """Return whether a tensor is free of NaN and infinity; True for integers."""
        dtype = self.entries[name].dtype
        return dtype not in FLOATS or bool(np.isfinite(to_float32(self.raw(name), dtype)).all())


def bits(entry: Entry) -> np.ndarray:
    """Return the bits of a tensor in a file, in the numpy type of `RAW`."""
    with entry.file.open("rb") as file:
        file.seek(entry.start)
        data = np.fromfile(file, RAW[entry.dtype], prod(entry.shape))
    return data.reshape(entry.shape)


def same_bytes(a: Entry, b: Entry) -> bool:
    """Return whether two tensors are stored with the same dtype and bits."""
    left = a.end - a.start
    if a.dtype != b.dtype or left != b.end - b.start:
        return False
    with a.file.open("rb") as one, b.file.open("rb") as other:
        one.seek(a.start)
        other.seek(b.start)
        while left:
            size = min(CHUNK, left)
            if one.read(size) != other.read(size):
                return False
            left -= size
    return True


def to_float32(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Convert bits of a floating dtype to float32 (float32 is not copied); integers (position tables) too.

    Raises `UnsupportedModel` for fp8, which can only be copied.
    """
    if dtype.startswith("F8"):
        raise UnsupportedModel(
            f"Weights in {dtype} can be copied, but nothing can be computed with them.",
            "Save a copy in bf16 or fp32 first.",
        )
    if dtype == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32, copy=False)


def from_float32(values: np.ndarray, dtype: str) -> np.ndarray:
    """Convert float32 to the bits of a floating dtype, rounded to nearest even."""
    if dtype == "BF16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        # Rounding carries a NaN's bits into the sign; keep NaN, with its sign and its leading bits.
        return np.where(np.isnan(bits.view(np.float32)), (bits >> 16).astype(np.uint16) | 0x40, rounded)
    if dtype not in FLOATS:
        raise UnsupportedModel(f"New values cannot be written in {dtype}.", "Use a checkpoint in fp32, fp16 or bf16.")
    return values.astype(RAW[dtype])


@dataclass(frozen=True)
class TensorOut:
    """A tensor to write: either the bytes of `entry` unchanged, or what `make()` returns (raw bits of `shape`)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    entry: Entry | None = None
    make: Callable[[], np.ndarray] | None = None

    @property
    def nbytes(self) -> int:
        """Size of the tensor in the file, in bytes."""
        return prod(self.shape) * RAW[self.dtype].itemsize

    def float32(self) -> np.ndarray:
        """Return what will be written, as float32."""
        return to_float32(self.make() if self.make else bits(self.entry), self.dtype)


def write(folder: Path, tensors: Iterable[TensorOut], shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Write tensors as `model.safetensors` or as shards with an index, holding one tensor in memory at a time."""
    shards, size = [[]], 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    if len(shards) == 1:
        return [write_file(folder / "model.safetensors", shards[0])]
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    paths = [write_file(folder / name, shard) for name, shard in zip(names, shards, strict=True)]
    index = {
        "metadata": {"total_size": sum(t.nbytes for shard in shards for t in shard)},
        "weight_map": {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2))
    return paths


def write_file(path: Path, tensors: list[TensorOut]) -> Path:
    """Write one safetensors file. If the disk is full, the `LeanSurgeonError` says how much was needed."""
    header = {"__metadata__": {"format": "pt"}}
    offset = 0
    for t in tensors:
        header[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [offset, offset + t.nbytes]}
        offset += t.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # aligns the data to 8 bytes
    try:
        with path.open("wb") as out:
            out.write(struct.pack("<Q", len(encoded)) + encoded)
            for t in tensors:
                if t.entry is not None:
                    copy_range(t.entry, out)
                else:
                    write_array(out, t)
        sync(path)
    except OSError as error:
        if disk_is_full(error):
            raise LeanSurgeonError(
                f"The disk is full: {path.name} needs {offset:,} bytes.", "Free some space or choose another -o."
            ) from None
        raise
    return path


def write_array(out, tensor: TensorOut) -> None:
    """Create a tensor and append its bytes. Raises AssertionError if it lacks the announced dtype and shape."""
    data = np.asarray(tensor.make(), order="C")  # a scalar stays one
    if data.shape != tensor.shape or data.dtype != RAW[tensor.dtype]:
        raise AssertionError(f"{tensor.name}: made {data.dtype} {data.shape}, announced {tensor.dtype} {tensor.shape}")
    out.write(data)


def copy_range(entry: Entry, out) -> None:
    """Copy a byte range inside the kernel where possible (Linux), else through a buffer."""
    start, left = entry.start, entry.end - entry.start
    out.flush()  # the kernel writes after what is in the file
    with entry.file.open("rb", buffering=0) as source:
        try:
            while left:
                done = os.copy_file_range(source.fileno(), out.fileno(), left, start)
                if not done:
                    break
                start, left = start + done, left - done
        except OSError as error:
            if disk_is_full(error):
                raise
            # EXDEV, EINVAL, ENOSYS: another file system; the kernel cannot copy
        source.seek(start)
        while left:
            chunk = source.read(min(CHUNK, left))
            if not chunk:
                raise UnsupportedModel(f"{entry.file.name} became shorter while it was read.")
            out.write(chunk)
            left -= len(chunk)
