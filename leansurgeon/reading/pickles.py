"""Pickles of tensors, by torch's restricted reader, which executes no code from a pickle."""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leansurgeon.errors import LeanSurgeonError, UnsupportedModel, memory_is_short, quote, raised_as
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
            raise UnsupportedModel(f"{path.name} names a tensor {quote(name)}, which is no text.")
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
