"""Map the tensor names of a built model to the names that the library writes to file. Imports torch.

Some tensors are stored in parts and merged in memory (the experts of a mixture). The library defines both directions:
it is asked under which names it would save a tensor, and a one-layer model that it loads from the parts holds the
merged tensor.
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
from leansurgeon.architectures.infer.library import plain
from leansurgeon.checkpoints.kind import class_name, transformers_class
from leansurgeon.errors import UnsupportedModel
from leansurgeon.progress import quiet_transformers
from leansurgeon.shape import Shape


def bare_name(name: str, architecture: Architecture) -> str:
    """Return a file name without the prefix of the base model, which files of other classes may add or omit."""
    return name.removeprefix(next((p for p in architecture.prefixes if p and name.startswith(p)), ""))


def file_names(model: nn.Module, library: str) -> Mapping[str, tuple[str, ...]]:
    """Return the file names of every tensor in memory; a tensor that is saved in parts has several.

    For timm both names are equal. Raises `UnsupportedModel` if the library merges several tensors into one file name.
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
    """Convert tensors in memory to their form in the file. Raises `UnsupportedModel` if that needs other tensors."""
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
    """Return a block's tensors in fp32 by their names in memory within the block, merged from the tensors of a file.

    `block` is the path of the model's first block. Raises `UnsupportedModel` for models with several stages.
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
    with library_builds(cls.__name__), quiet_transformers(), torch.random.fork_rng(devices=[]):
        made = cls.from_pretrained(
            None, config=cls.config_class.from_dict(plain(alone)), state_dict=state, dtype=torch.float32
        )
    return dict(made.get_submodule(block).state_dict())
