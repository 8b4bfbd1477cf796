"""Mixup and cutmix of timm, drawn from (seed, epoch, step), the same on any number of processes and micro batches.

timm mixes a batch with its own reverse. Here every micro batch is put in such an order that the reverse pairs sample 2i
with sample 2i + 1: so it is always the same two samples of the global batch that are mixed, by the same amount, however
the batch is cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from leansurgeon.errors import UsageError
from leansurgeon.tasks import Task
from leansurgeon.training.data import order
from leansurgeon.training.data.feed import Batch
from leansurgeon.training.recipe.settings import Train


class Mixing:
    """Mixes training batches of images: labels (B,) become shares of the classes (B, C)."""

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
            label_smoothing=0.0,  # the score smooths, mixed or not
            num_classes=int(classes),
        )

    def __call__(self, batch: Batch, epoch: int, step: int) -> Batch:
        """The mixed batch of optimizer step `step`; `pixel_values` (B, C, H, W), B even."""
        places = paired(len(batch["labels"]), batch["labels"].device)
        batch = {key: value.index_select(0, places) for key, value in batch.items()}
        with numpy_seeded(order.mixing_seed(self.seed, epoch, step)):
            images, shares = self._mixup(batch["pixel_values"], batch["labels"])
        return batch | {"pixel_values": images, "labels": shares}


def paired(size: int, device: torch.device) -> torch.Tensor:
    """`[0, 2, 4, ..., 5, 3, 1]`: in this order, the reverse of a batch pairs its samples 2i and 2i + 1."""
    return torch.cat([torch.arange(0, size, 2), torch.arange(size - 1, 0, -2)]).to(device, non_blocking=True)


@contextmanager
def numpy_seeded(seed: int) -> Iterator[None]:
    """numpy's global generator, which timm draws from, seeded for a moment and then as it was."""
    before = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(before)
