"""What the tensors of a built model are called in the file that the library writes, also those that stand apart there
and together in memory, as those of experts do. Imports torch.

How parts become a whole is the library's business: it says into which names it would save a tensor, and a model of one
layer that it loads from the parts has the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from leansurgeon.architectures.base import Architecture, Config
from leansurgeon.architectures.foreign import library_builds
from leansurgeon.checkpoints.kind import class_name, transformers_class
from leansurgeon.checkpoints.publish.durable import scratch
from leansurgeon.errors import UnsupportedModel
from leansurgeon.progress import quiet_transformers
from leansurgeon.shape import Shape


def bare_name(name: str, architecture: Architecture) -> str:
    """A file name without the prefix of the base model, which files of other classes write or leave out."""
    return name.removeprefix(next((p for p in architecture.prefixes if p and name.startswith(p)), ""))


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
            unsaved = {*(getattr(model, "all_tied_weights_keys", None) or ()), *(model._keys_to_ignore_on_save or ())}
            whole = {name: torch.empty(tensor.shape, device="meta") for name, tensor in model.state_dict().items()}
            return {name: tuple(split_parts(model, {name: whole[name]})) for name in whole if name not in unsaved}
        saved = load_file(Path(folder) / "model.safetensors")
    strange = next((name for name, value in saved.items() if value.shape != (1,)), None)
    if strange:
        raise UnsupportedModel(
            f"The library puts '{strange}' of {type(model).__name__} together from several tensors while saving."
        )
    return {memory[int(value[0])]: (name,) for name, value in saved.items()}


# -- tensors that are saved in parts --------------------------------------------------------------------------------


def split_parts(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors in memory as a file holds them. Raises `UnsupportedModel` where that takes others, too."""
    from transformers.core_model_loading import revert_weight_conversion

    try:
        return dict(revert_weight_conversion(model, dict(tensors)))
    except Exception as error:
        raise UnsupportedModel(
            f"{type(model).__name__} puts '{next(iter(tensors))}' together from several tensors of its files "
            f"({type(error).__name__}), so it cannot be run block by block.",
            "Without --calibrate, layers are dropped and heads added all the same.",
        ) from None


def join_parts(
    config: Config, architecture: Architecture, layer: int, tensors: Mapping[str, np.ndarray], block: str
) -> dict[str, Tensor]:
    """A block's tensors by their names within it in memory, in fp32, made of those of a file; `block` is the path of
    the model's first block. Raises `UnsupportedModel` for models of several stages.
    """
    shape = architecture.shape(config)
    if len(shape.stages) > 1:
        raise UnsupportedModel(f"{architecture.name} has experts in several stages; blocks cannot be taken one by one.")
    alone = architecture.with_shape(config, Shape((replace(shape.stages[0], depth=1),)), [layer])
    pattern = architecture.blocks().layer
    state = {
        name.replace(pattern.format(i=layer), pattern.format(i=0), 1): torch.from_numpy(np.array(values))
        for name, values in tensors.items()
    }
    cls = transformers_class(architecture, class_name(alone))
    plain = {key: value for key, value in alone.items() if key not in ("torch_dtype", "dtype", "auto_map")}
    with library_builds(cls.__name__), quiet_transformers(), torch.random.fork_rng(devices=[]):
        made = cls.from_pretrained(
            None, config=cls.config_class.from_dict(plain), state_dict=state, dtype=torch.float32
        )
    return dict(made.get_submodule(block).state_dict())
