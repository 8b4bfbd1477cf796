"""Floating-point operations of a training."""

from __future__ import annotations

import copy

import torch

from leansurgeon.checkpoints.model import Loaded
from leansurgeon.tasks import Task
from leansurgeon.training import objective
from leansurgeon.training.distributed import without_memory


def of_training(
    loaded: Loaded, task: Task, batch: dict[str, torch.Tensor], *, sparse_prediction: bool = True
) -> float | None:
    """Return forward and backward FLOPs of one sample, from a batch `(B, ...)`; None if they cannot be counted.

    Uses torch's own counter on tensors without memory (device "meta"), which counts attention too: on a CPU its fused
    kernel counts as nothing. Only matrix products and convolutions count; the rest is small. The head of a masked
    language model counts at the masked tokens only, unless `sparse_prediction` is off.
    """
    from torch.utils.flop_counter import FlopCounterMode

    if not (sparse_prediction and objective.head_of(loaded.model)):
        batch = objective.without_places(batch)
    try:
        shadow = copy.copy(loaded)
        shadow.model = without_memory(loaded.model).train()
        inputs = {key: value.to("meta") for key, value in batch.items()}
        counter = FlopCounterMode(display=False)
        with counter, torch.enable_grad():
            task.score(objective.predict(shadow, inputs), objective.labels_of_places(inputs)).loss_sum.backward()
        total = counter.get_total_flops()
    except Exception:  # a model whose control flow depends on values cannot run on meta tensors
        return None
    return total / len(batch["labels"]) if total else None
