"""Pickles: tensors by torch's restricted reader, arrays by our own. Neither executes code from a pickle."""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from leansurgeon.errors import LeanSurgeonError, UnsupportedModel, UsageError, memory_is_short, quote, raised_as
from leansurgeon.reading import files

if TYPE_CHECKING:
    from torch import Tensor

SHARED = 8  # limit for tensors, relative to the file size: tied ones are stored once
NESTED = ("state_dict", "model")  # where training scripts put the tensors


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the plain tensors of a pickle on the CPU, by name, each with its own memory; other values are left out.

    Raises `UnsupportedModel` for a pickle that is damaged, holds more than tensors (it is read with
    `weights_only=True`), or holds tensors that safetensors cannot store.
    """
    loaded = _load(path)
    for key in NESTED:
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    if not isinstance(loaded, dict):
        raise UnsupportedModel(
            f"{path.name} holds {quote(type(loaded).__name__)} where names and their tensors are expected."
        )
    import torch

    tensors = {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise UnsupportedModel(f"{path.name} names a tensor {quote(name)}, which is not text.")
        if strange := _what_is_strange(tensor):
            raise UnsupportedModel(f"{quote(name)} in {path.name} is {strange}, and surgery needs plain tensors.")
    size, limit = sum(t.numel() * t.element_size() for t in tensors.values()), SHARED * path.stat().st_size
    if size > limit:
        raise UnsupportedModel(
            f"The tensors of {path.name} take {size:,} bytes in memory, more than {SHARED} times the file's "
            f"{limit // SHARED:,}."
        )
    return {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}


def _load(path: Path) -> Any:
    import torch

    with raised_as(UnsupportedModel), files.open_regular(path) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if zipfile.is_zipfile(file):
                # torch stores its records uncompressed; a compressed one could expand a thousandfold.
                compressed = [i for i in zipfile.ZipFile(file).infolist() if i.compress_type != zipfile.ZIP_STORED]
                if compressed:
                    raise UnsupportedModel(f"{path.name} is compressed, and torch writes its files uncompressed.")
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
        except LeanSurgeonError:
            raise
        except Exception as error:
            if memory_is_short(error):
                raise UnsupportedModel(f"{path.name} asks for more memory than there is.") from None
            # Damaged pickles fail in all kinds of ways. torch's own text advises weights_only=False; we do not.
            raise UnsupportedModel(
                f"{path.name} is damaged or holds more than tensors, so weights_only=True refuses it.",
                "Do not load it any other way unless you know who wrote it.",
            ) from None


def _what_is_strange(tensor: Tensor) -> str | None:
    """Return in words why a tensor is not plain; None if it is."""
    import torch

    if tensor.layout is not torch.strided:
        return "sparse"
    if tensor.is_quantized:
        return "quantised"
    if tensor.device.type != "cpu":
        return f"on the device {tensor.device.type}"
    whole = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    if tensor.is_complex() or not (tensor.is_floating_point() or tensor.dtype in whole):
        return f"of the type {str(tensor.dtype).removeprefix('torch.')}"
    return None


class _Arrays(pickle.Unpickler):
    """Read arrays, lists and texts, and reject everything else: a pickle may name any function to be called."""

    _ALLOWED = frozenset(
        [(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")]
        + [("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")]
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no array needs")
        return super().find_class(module, name)


def parse_arrays(content: bytes, where: str) -> dict[bytes, Any]:
    """Parse a pickled dictionary of arrays, as Python 2 wrote it. Raises `UsageError`; `where` begins its sentence."""
    try:
        arrays = _Arrays(io.BytesIO(content), encoding="bytes").load()
    except (KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:  # damaged pickles fail in all kinds of ways
        raise UsageError(f"{where} is not a pickle of arrays: {error}.") from None
    if not isinstance(arrays, dict):
        raise UsageError(f"{where} is not a pickle of arrays: it holds {quote(type(arrays).__name__)}.")
    for key, value in arrays.items():
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            raise UsageError(f"{where} is not a pickle of arrays: {quote(key)} holds objects.")
    return arrays
