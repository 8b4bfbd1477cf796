"""Low-rank adapters (Hu et al., 2021) through peft: the blocks' matrices stay as they are, and each learns a correction
of low rank. What is saved is merged, so that it is a plain checkpoint again.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import nn

from leansurgeon.checkpoints.model import Loaded
from leansurgeon.errors import UsageError
from leansurgeon.tasks import Task
from leansurgeon.training.recipe.settings import Lora
from leansurgeon.training.update.distill import blocks

CLASSES = ("image-classification", "sequence-classification")
HEADS = ("classifier", "score", "head", "pooler", "fc_norm")  # what is above the blocks of a model that tells classes


def apply(loaded: Loaded, settings: Lora, task: Task) -> None:
    """Put adapters beside every matrix of the blocks and freeze everything else but a classifier's head. Raises
    `UsageError` where peft is not installed or the family's blocks are not known.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise UsageError("LoRA needs peft.", "pip install 'leansurgeon[lora]'") from None
    inside = matrices(loaded)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha or 2 * settings.rank,
        lora_dropout=settings.dropout,
        target_modules=inside,
        fan_in_fan_out=any(type(loaded.model.get_submodule(name)).__name__ == "Conv1D" for name in inside),
    )
    inject_adapter_in_model(config, loaded.model)
    for name, parameter in loaded.model.named_parameters():
        head = task.head in CLASSES and any(part in HEADS for part in name.split("."))
        parameter.requires_grad_("lora_" in name or head)


def matrices(loaded: Loaded) -> list[str]:
    """Names of the linear layers in the blocks. Raises `UsageError` where there are none."""
    within = {id(module) for block in blocks(loaded) for module in block.modules()}
    names = [
        name
        for name, module in loaded.model.named_modules()
        if id(module) in within and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
    ]
    if not names:
        raise UsageError(f"{type(loaded.model).__name__} has no linear layers in its blocks.", "Leave --lora out.")
    return names


@torch.no_grad()
def merged(loaded: Loaded) -> Loaded:
    """The same model as a plain one: every adapter added to its matrix, in a copy."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    model = copy.deepcopy(loaded.model)
    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.get_base_layer())
    return replace(loaded, model=model)
