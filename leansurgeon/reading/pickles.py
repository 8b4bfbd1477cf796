"""Pickles of tensors, by torch's restricted reader, which executes no code from a pickle."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from leansurgeon.errors import UnsupportedModel, memory_is_short, quote, raised_as
from leansurgeon.reading import files

if TYPE_CHECKING:
    from torch import Tensor

NESTED = ("state_dict", "model")  # where training scripts put the tensors


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a pickle on the CPU, by name, each with its own memory; other values are left out.

    Raises `UnsupportedModel` for a pickle that is damaged or holds more than tensors (it is read with
    `weights_only=True`).
    """
    import torch

    with raised_as(UnsupportedModel), files.open_regular(path) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            loaded = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            if memory_is_short(error):
                raise
            # Damaged pickles fail in all kinds of ways. torch's own text advises weights_only=False; we do not.
            raise UnsupportedModel(
                f"{path.name} is damaged or holds more than tensors, so weights_only=True refuses it.",
                "Do not load it any other way unless you know who wrote it.",
            ) from None
    for key in NESTED:
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    if not isinstance(loaded, dict):
        raise UnsupportedModel(
            f"{path.name} holds {quote(type(loaded).__name__)} where names and their tensors are expected."
        )
    tensors = {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
    return {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items() if isinstance(name, str)}
