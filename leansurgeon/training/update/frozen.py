"""Weights that a training leaves alone: those of the first blocks, and of all that stands before them."""

from __future__ import annotations

from leansurgeon.checkpoints.model import Loaded
from leansurgeon.errors import UsageError, plural
from leansurgeon.training.update.distill import blocks


def apply(loaded: Loaded, count: int) -> None:
    """Freeze the first `count` blocks and what the model names before them: embeddings, and where it is tied to them
    the head. The backward pass ends where they begin. Raises `UsageError` where nothing would be left to train.
    """
    every = blocks(loaded)
    if count >= len(every):
        raise UsageError(
            f"train.frozen_blocks is {count}, and {type(loaded.model).__name__} has {plural(len(every), 'block')}.",
            f"Leave some to train: --set train.frozen_blocks={len(every) - 1}.",
        )
    frozen = {id(parameter) for block in every[:count] for parameter in block.parameters()}
    inside = {id(parameter) for block in every for parameter in block.parameters()}
    before = True
    for parameter in loaded.model.parameters():
        before = before and id(parameter) not in inside
        if before or id(parameter) in frozen:
            parameter.requires_grad_(False)
