"""Regularization that changes the model or its batches for one training: dropout, stochastic depth, mixup and cutmix,
frozen blocks, low-rank adapters. The model's config does not change.

Stochastic depth (drop path, Huang et al., 2016) works in models that have places for it: all timm models. Rates are
those that timm's own models use for `drop_path_rate`, since papers give that number alone: linear from 0 at the first
block to the rate at the last, unless the family's declaration says otherwise (`timm_models.DropPath`). Classes are
found by name: a model that was cut is still made of timm's classes.

Mixup and cutmix are timm's, drawn from (seed, epoch, step), the same on any number of processes and micro batches. timm
mixes a batch with its own reverse. Here every micro batch is ordered so that the reverse pairs sample 2i with sample 2i
+ 1: the same two samples of the global batch are always mixed, by the same amount, however the batch is split.

Low-rank adapters (Hu et al., 2021) are peft's: the blocks' matrices stay as they are, and each learns a low-rank
correction. The saved model is merged, so it is a plain checkpoint again.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from itertools import takewhile

import numpy as np
import torch
from torch import nn

from leansurgeon import architectures
from leansurgeon.checkpoints.model import Loaded
from leansurgeon.errors import UsageError, plural
from leansurgeon.tasks import Task
from leansurgeon.training import data_loader
from leansurgeon.training.recipe.schema import Lora, Train


def set_dropout(model: nn.Module, rate: float, family: str) -> None:
    """Set `rate` on every `nn.Dropout`, and on every module that keeps a dropout rate for its attention.

    Raises `UsageError` if the model has none and `rate` is not 0.
    """
    has_dropout = False
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p, has_dropout = rate, True
        # Fused attention takes its rate as a number, which modules keep as `dropout`, `attention_dropout`, ...
        for name, value in vars(module).items():
            if "dropout" in name and type(value) is float:
                setattr(module, name, rate)
                has_dropout = True
    if rate and not has_dropout:
        raise UsageError(f"{family} models do not support dropout.", "Leave train.dropout out.")


_PLACES = ("drop_path", "drop_path1", "drop_path2", "drop_path3")
_TIMM = [family.timm for family in architectures.load_families().values() if family.timm]
_CONSTANT = {timm.kind for timm in _TIMM if timm.drop_path.constant}
_BESIDE = {name for timm in _TIMM for name in timm.drop_path.beside}
_SPARED = {name for timm in _TIMM for name in timm.drop_path.spared}
_HALVES = {name for timm in _TIMM for name in timm.drop_path.halves}


def set_drop_path(model: nn.Module, rate: float, family: str) -> None:
    """Drop the branches of the last block with probability `rate`, those of the first never, linearly between; or as
    timm does it where that differs (see above).

    Raises `UsageError` for a model that has no place for it.
    """
    from timm.layers import DropPath

    in_order: dict[str, list[nn.Module]] = {}  # modules with places for drop path, those of one block together
    for path, module in model.named_modules():
        kind = type(module).__name__
        if kind not in _BESIDE and _places(module):
            in_order.setdefault(path.rpartition(".")[0] if kind in _HALVES else path, []).append(module)
    if not in_order:
        raise UsageError(
            f"{family} models do not support drop_path.", "Leave train.drop_path out; timm's models have one."
        )
    # Our variants with another head size are subclasses of timm's.
    constant = any(kind.__name__ in _CONSTANT for module in model.modules() for kind in type(module).__mro__)
    for index, modules in enumerate(in_order.values()):
        share = 1.0 if constant else index / max(1, len(in_order) - 1)
        for module in modules:
            if type(module).__name__ not in _SPARED:
                for name in _places(module):
                    setattr(module, name, DropPath(rate * share))


def _places(module: nn.Module) -> list[str]:
    from timm.layers import DropPath

    return [name for name in _PLACES if isinstance(getattr(module, name, None), (nn.Identity, DropPath))]


class BatchMixing:
    """Mixes training batches of images: labels (B,) become soft labels (B, C)."""

    def __init__(self, train: Train, task: Task) -> None:
        from timm.data import Mixup

        classes = task.model_overrides().get("num_labels")
        if task.head != "image-classification" or not classes:
            raise UsageError(
                f"mixup and cutmix mix images, and task '{task.name}' is {task.head}.",
                "Leave train.mixup and train.cutmix out.",
            )
        self.seed = train.seed
        self._mixup = Mixup(
            mixup_alpha=train.mixup,
            cutmix_alpha=train.cutmix,
            prob=train.mixup_prob,
            switch_prob=train.switch_prob,
            label_smoothing=0.0,  # the score applies smoothing, mixed or not
            num_classes=int(classes),
        )

    def __call__(self, batch: data_loader.Batch, epoch: int, step: int) -> data_loader.Batch:
        """Return the mixed batch of optimizer step `step`; `pixel_values` (B, C, H, W), B even."""
        places = pairing_order(len(batch["labels"]), batch["labels"].device)
        batch = {key: value.index_select(0, places) for key, value in batch.items()}
        before = np.random.get_state()  # numpy's global generator, which timm draws from
        np.random.seed(data_loader.mixing_seed(self.seed, epoch, step))
        try:
            images, shares = self._mixup(batch["pixel_values"], batch["labels"])
        finally:
            np.random.set_state(before)
        return batch | {"pixel_values": images, "labels": shares}


def pairing_order(size: int, device: torch.device) -> torch.Tensor:
    """Return `[0, 2, 4, ..., 5, 3, 1]`: in this order, the reverse of a batch pairs its samples 2i and 2i + 1."""
    return torch.cat([torch.arange(0, size, 2), torch.arange(size - 1, 0, -2)]).to(device, non_blocking=True)


def freeze_blocks(loaded: Loaded, count: int) -> None:
    """Freeze the first `count` blocks and everything before them: the embeddings, and a head that is tied to them. The
    backward pass ends there.

    Raises `UsageError` if nothing would be left to train.
    """
    every = loaded.blocks
    if count >= len(every):
        raise UsageError(
            f"train.frozen_blocks is {count}, and {type(loaded.model).__name__} has {plural(len(every), 'block')}.",
            f"Leave some to train: --set train.frozen_blocks={len(every) - 1}.",
        )
    for parameter in [*leading_parameters(loaded), *(one for block in every[:count] for one in block.parameters())]:
        parameter.requires_grad_(False)
    for module in loaded.model.modules():  # training mode would update their statistics
        own = [*module.parameters()]
        if own and isinstance(module, nn.modules.batchnorm._BatchNorm) and not any(one.requires_grad for one in own):
            module.eval()
            module.train = partial(stay, module)


def stay(module: nn.Module, mode: bool = True) -> nn.Module:
    """Keep the module in evaluation mode, whatever `mode` says."""
    return module


def leading_parameters(loaded: Loaded) -> list[nn.Parameter]:
    """Return the parameters before the first block: all that the model names before it, except a final norm (which OPT
    names first).
    """
    inside = {id(parameter) for block in loaded.blocks for parameter in block.parameters()}
    before = takewhile(lambda named: id(named[1]) not in inside, loaded.model.named_parameters())
    return [parameter for name, parameter in before if "final" not in name]


CLASSES = ("image-classification", "sequence-classification")
HEADS = ("classifier", "score", "head", "pooler", "fc_norm")  # modules above the blocks of a classifier


def add_lora(loaded: Loaded, settings: Lora, task: Task) -> None:
    """Add adapters to every matrix of the blocks and freeze everything else except a classifier's head.

    Raises `UsageError` if peft is not installed or the family's blocks are not known.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise UsageError("LoRA needs peft.", "pip install 'leansurgeon[lora]'") from None
    within = {id(module) for block in loaded.blocks for module in block.modules()}
    inside = [
        name
        for name, module in loaded.model.named_modules()
        if id(module) in within and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
    ]
    if not inside:
        raise UsageError(f"{type(loaded.model).__name__} has no linear layers in its blocks.", "Leave --lora out.")
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


@torch.no_grad()
def merge_lora(loaded: Loaded) -> Loaded:
    """Return a copy of the model with every adapter merged into its matrix."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    model = copy.deepcopy(loaded.model)
    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.get_base_layer())
    return replace(loaded, model=model)
