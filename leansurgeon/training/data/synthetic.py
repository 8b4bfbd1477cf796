"""A task without its data, for a dry run: sizes that are published or stand in the recipe, batches of the right shapes.

Shape letters: B samples, T tokens, C channels, S pixels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from leansurgeon.checkpoints.model import Loaded
from leansurgeon.tasks import Task
from leansurgeon.tasks.base import Batch, Overrides
from leansurgeon.training.data.limit import Instead

# Samples to train on and to evaluate, as the authors publish them.
SIZES = {
    "imagenet": (1_281_167, 50_000),
    "cifar10": (50_000, 10_000),
    "fashion-mnist": (60_000, 10_000),
    "lra-text": (25_000, 25_000),
    "lra-retrieval": (147_086, 18_090),
}
_ANY = 2**40  # where nobody knows: more than a batch


class Synthetic(Instead):
    """Stands in for `task`, whose data is not there. `know` must have been called before `batch`."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.sizes = _sizes(task)
        self.sized = self.sizes is not None
        self._config: dict[str, Any] = {}

    def size(self, split: str) -> int:
        return self.sizes[split == "eval"] if self.sizes else _ANY

    def model_overrides(self) -> Overrides:
        """What the task knows without its data."""
        try:
            return self._task.model_overrides()
        except (KeyError, AttributeError, RuntimeError):
            named = {"num_labels": "classes", "image_size": "image_size", "num_channels": "channels"}
            options = {key: getattr(self._task.options, option, None) for key, option in named.items()}
            return {key: value for key, value in options.items() if value is not None}

    def know(self, loaded: Loaded) -> None:
        """Take from the model what the recipe leaves open: image size, vocabulary, number of classes."""
        self._config = {**loaded.config, **loaded.architecture.flat(loaded.config)}

    def batch(self, split: str, indices: np.ndarray, *, seed: int, epoch: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        count = len(indices)

        def ids(*shape: int, below: int) -> Tensor:
            return torch.randint(0, max(1, below), shape, generator=generator)

        if self._task.head == "image-classification":
            channels, size = self._known("num_channels", "in_chans"), self._known("image_size", "img_size")
            pixels = torch.randn(count, channels, size, size, generator=generator)
            return {"pixel_values": pixels, "labels": ids(count, below=self._known("num_labels", "num_classes"))}
        length = getattr(self._task, "seq_len", None) or getattr(self._task.options, "seq_len", 128)
        tokens = ids(count, length, below=self._known("vocab_size"))
        if self._task.head == "causal-lm":
            return {"input_ids": tokens, "labels": tokens.clone()}
        if self._task.head == "masked-lm":
            chosen = torch.rand(tokens.shape, generator=generator) < self._task.options.mask_prob
            chosen[:, 0] = True
            return {"input_ids": tokens, "labels": torch.where(chosen, tokens, -100)}
        texts = getattr(self._task, "texts", ("",))  # of lra-retrieval there are two
        inputs = {f"input_ids{suffix}": tokens for suffix in texts}
        inputs |= {f"attention_mask{suffix}": torch.ones_like(tokens) for suffix in texts}
        classes = self._known("num_labels")
        return inputs | {"labels": torch.zeros(count) if classes == 1 else ids(count, below=classes)}

    def _known(self, *names: str) -> int:
        """The first of these that the task or the model's config says."""
        classes = self._config.get("num_labels") or len(self._config.get("id2label") or {}) or 2
        known = self.model_overrides() | {"num_labels": classes} | {k: self._config.get(k) for k in names}
        given = {**known, **{k: v for k, v in self.model_overrides().items() if v is not None}}
        value = next(given[name] for name in names if given.get(name) is not None)
        return int(value[0] if isinstance(value, (list, tuple)) else value)


def _sizes(task: Task) -> tuple[int, int] | None:
    """From the options of a task that generates its data, or as published."""
    options, known = task.options, SIZES.get(task.name)
    train = getattr(options, "train", None) or getattr(options, "train_samples", None)
    evaluation = getattr(options, "eval", None) or getattr(options, "eval_samples", None)
    if isinstance(train, int) and isinstance(evaluation, int):
        return train, evaluation
    return known and (train if isinstance(train, int) else known[0], known[1])
