"""What the tensors of a built model are called in the file that the library writes, also those that stand apart there
and together in memory, as those of experts do. Imports torch.

How parts become a whole is the library's business: it says into which names it would save a tensor, and a model of one
layer that it loads from the parts has the whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from leansurgeon.architectures.base import Architecture, Config
from leansurgeon.architectures.foreign import library_builds
from leansurgeon.checkpoints.kind import class_name, transformers_class
from leansurgeon.errors import UnsupportedModel
from leansurgeon.progress import quiet_transformers
from leansurgeon.shape import Shape


def bare_name(name: str, architecture: Architecture) -> str:
    """A file name without the prefix of the base model, which files of other classes write or leave out."""
    return name.removeprefix(next((p for p in architecture.prefixes if p and name.startswith(p)), ""))


def file_names(model: nn.Module, library: str) -> Mapping[str, tuple[str, ...]]:
    """File names by names in memory, several for a tensor that is saved in parts; timm's are equal. Raises
    `UnsupportedModel`.
    """
    memory = model.state_dict()
    if library == "timm":
        return {name: (name,) for name in memory}
    whole = {name: torch.empty(tensor.shape, device="meta") for name, tensor in memory.items()}
    for unsaved in model._keys_to_ignore_on_save or ():
        whole.pop(unsaved, None)
    names = {name: tuple(split_parts(model, {name: tensor})) for name, tensor in whole.items()}
    (often, count), *_ = Counter(part for parts in names.values() for part in parts).most_common(1)
    if count > 1:
        raise UnsupportedModel(
            f"The library puts '{often}' of {type(model).__name__} together from several tensors while saving."
        )
    return names


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
