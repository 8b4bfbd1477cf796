"""Optimizers with the parameter groups that the field uses."""

from __future__ import annotations

import re

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from leansurgeon.training.recipe.settings import Optim, Train

# Learned positions and class/distillation tokens under the names of transformers, timm and our own modules. Their
# matrices have two or three dimensions, so that the rule "no decay below two dimensions" would miss them.
_POSITION_OR_CLASS = re.compile(
    r"(^|\.)(pos_embed|pos_emb|pos_embedding|position_embeddings?|embed_positions|wpe|cls_token|class_token|cls_pos|"
    r"dist_token|distillation_token|reg_token|register_tokens|mask_token)(\.|$)"
)


def is_decayed(name: str, ndim: int) -> bool:
    """Whether weight decay pulls on this parameter: matrices do, biases, norms and position/class embeddings do not."""
    return ndim >= 2 and not _POSITION_OR_CLASS.search(name)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups, decayed and not, of the trainable parameters; a tied parameter stands in one of them, once."""
    decayed, free = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (decayed if is_decayed(name, parameter.ndim) else free).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def make(model: nn.Module, optim: Optim, *, fused: bool) -> torch.optim.Optimizer:
    """The optimizer on `parameter_groups`; `fused` is the one-kernel form (torch's own, not LAMB)."""
    groups = parameter_groups(model, optim.weight_decay)
    if optim.name == "lamb":
        from timm.optim import Lamb

        # The gradient is clipped by the loop, as with the others.
        return Lamb(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, max_grad_norm=None)
    if optim.name == "sgd":
        return SGD(groups, lr=optim.lr, momentum=optim.momentum, fused=fused or None)
    kind = AdamW if optim.name == "adamw" else Adam
    return kind(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=fused or None)


def in_one_kernel(train: Train, device: str, *, sharing: bool) -> bool:
    """Whether the optimizer's one-kernel form is taken: on CUDA, and where it is known to work on a CPU, too, which is
    Adam on whole weights without fp16's scaler (three times as fast there).
    """
    adam = train.optim.name in ("adam", "adamw")
    return device == "cuda" or (device == "cpu" and adam and not sharing and train.precision != "fp16")


def numbers_per_weight(train: Train) -> int:
    """How many numbers the optimizer keeps for every weight."""
    if train.optim.name != "sgd":
        return 2
    moved = train.schedule.name == "one-cycle" and train.schedule.momentum is not None
    return int(train.optim.momentum > 0 or moved)


def set_lr(optimizer: torch.optim.Optimizer, lr: float, momentum: float | None = None) -> None:
    """Set the learning rate of every group, and beta1 (or SGD's momentum) where a schedule moves it."""
    for group in optimizer.param_groups:
        group["lr"] = lr
        if momentum is not None:
            if "betas" in group:
                group["betas"] = (momentum, group["betas"][1])
            else:
                group["momentum"] = momentum
