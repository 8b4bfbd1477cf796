"""Handwritten digits, 8 x 8 pixels: the 1,797 images that scikit-learn carries, for an experiment of seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from pydantic import Field

from leansurgeon.tasks import base
from leansurgeon.tasks import cache as disk

EVAL_IMAGES = 360


class Options(base.Options):
    """The split is stratified by digit: 1,437 images to train on, 360 to evaluate."""

    split_seed: int = Field(0, ge=0)


class Digits(base.Task):
    """Ten-way classification of (1, 8, 8) images whose grey values 0..16 are scaled to -1..1; no augmentation."""

    name = "digits"
    head = "image-classification"
    metric = base.Metric("accuracy", "top-1 accuracy", higher_is_better=True, percent=True)
    Options = Options

    def prepare(self, cache: Path, model_dir: Path | None, *, workers: int, say: Callable[[str], None]) -> None:
        """Split scikit-learn's digits by `split_seed` and keep them as arrays."""
        key = {"version": 1, "split_seed": self.options.split_seed}
        self._open(disk.entry(cache, "digits", key, lambda folder: _split(folder, self.options.split_seed)))

    def batch(self, split: str, indices: np.ndarray, *, seed: int, epoch: int) -> base.Batch:
        """`pixel_values` (B, 1, 8, 8) from -1 to 1 and `labels` (B,)."""
        import torch

        split, indices = self._checked(split), np.asarray(indices)
        pixels = self._array(f"{split}-images")[indices].astype(np.float32) / 8 - 1
        labels = self._array(f"{split}-labels")[indices].astype(np.int64)
        return {"pixel_values": torch.from_numpy(pixels[:, None]), "labels": torch.from_numpy(labels)}

    def model_overrides(self) -> base.Overrides:
        """Ten classes, 8 pixels, one channel."""
        return {"num_labels": 10, "image_size": 8, "num_channels": 1}

    def describe(self) -> base.Description:
        """Sizes, source and licence of the data."""
        return {
            "train_samples": self.size("train"),
            "eval_samples": self.size("eval"),
            "source": "Optical recognition of handwritten digits (Alpaydin and Kaynak, UCI 1998), from scikit-learn",
            "licence": "CC BY 4.0",
        }


def _split(folder: Path, split_seed: int) -> disk.Info:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    images, labels = data.images.astype(np.uint8), data.target.astype(np.uint8)
    train, evaluation = train_test_split(
        np.arange(len(labels)), test_size=EVAL_IMAGES, random_state=split_seed, stratify=labels
    )
    for name, rows in (("train", train), ("eval", evaluation)):
        np.save(folder / f"{name}-images.npy", images[rows])
        np.save(folder / f"{name}-labels.npy", labels[rows])
    return {"sizes": {"train": len(train), "eval": len(evaluation)}}
