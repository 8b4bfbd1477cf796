"""What the tensors of a built model are called in the file that the library writes. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from leansurgeon.checkpoints.blockwise import merged
from leansurgeon.checkpoints.publish.leftovers import scratch
from leansurgeon.errors import UnsupportedModel
from leansurgeon.progress import quiet_transformers


def names_in_files(model: nn.Module, library: str) -> Mapping[str, str]:
    """File names by names in memory, of a tensor that is saved in parts that of the first."""
    return {memory: files[0] for memory, files in file_names(model, library).items()}


def file_names(model: nn.Module, library: str) -> Mapping[str, tuple[str, ...]]:
    """File names by names in memory. timm's are equal; of transformers' tied tensors some may lack."""
    memory = list(model.state_dict())
    if library == "timm":
        return {name: (name,) for name in memory}
    from safetensors.numpy import load_file

    numbers = {name: torch.tensor([i]) for i, name in enumerate(memory)}
    with scratch() as folder:
        try:
            with quiet_transformers():
                model.save_pretrained(folder, state_dict=numbers)
        except (IndexError, RuntimeError):  # numbers cannot be cut into the pieces that a tensor is saved in
            return merged.file_names(model)
        saved = load_file(Path(folder) / "model.safetensors")
    strange = next((name for name, value in saved.items() if value.shape != (1,)), None)
    if strange:
        raise UnsupportedModel(
            f"The library puts '{strange}' of {type(model).__name__} together from several tensors while saving."
        )
    return {memory[int(value[0])]: (name,) for name, value in saved.items()}
