"""Floating-point operations of a training, and what devices can do at most."""

from __future__ import annotations

import copy

import torch

from leansurgeon.checkpoints.model import Loaded
from leansurgeon.tasks import Task
from leansurgeon.training import objective
from leansurgeon.training.distributed import without_memory

# Dense peaks in FLOP/s of the makers' data sheets: (bf16 and fp16, fp32 as torch runs it by default, without TF32).
PEAKS = {
    "H200": (989e12, 67e12),
    "H100 PCIe": (756e12, 51e12),
    "H100": (989e12, 67e12),
    "B200": (2250e12, 75e12),
    "A100": (312e12, 19.5e12),
    "A10": (125e12, 31.2e12),
    "L40S": (362e12, 91.6e12),
    "L40": (181e12, 90.5e12),  # before L4, whose name is in its name
    "L4": (121e12, 30.3e12),
    "T4": (65e12, 8.1e12),
    "V100": (125e12, 15.7e12),
    "RTX 4090": (165e12, 82.6e12),
    "RTX 3090": (71e12, 35.6e12),
}


def peak(device_name: str, precision: str) -> float | None:
    """The most FLOP/s that the device can do in this precision; None where it is not known."""
    known = next((value for name, value in PEAKS.items() if name in device_name), None)
    return None if known is None else known[1 if precision == "fp32" else 0]


def of_training(
    loaded: Loaded, task: Task, batch: dict[str, torch.Tensor], *, sparse_prediction: bool = True
) -> float | None:
    """Forward and backward FLOPs of one sample, from a batch `(B, ...)`; None where they cannot be counted.

    Counted by torch's own counter on tensors without memory (device "meta"), where attention is counted too: on a CPU
    its fused kernel counts as nothing. Matrix products and convolutions count, the rest is small beside them. The head
    of a masked language model counts at the hidden tokens, unless `sparse_prediction` is off.
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
            task.score(objective.predict(shadow, inputs), objective.scored_labels(inputs)).loss_sum.backward()
        total = counter.get_total_flops()
    except Exception:  # a model that looks at its numbers cannot run without them; then there is no figure
        return None
    return total / len(batch["labels"]) if total else None
