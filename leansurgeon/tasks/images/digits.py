"""Handwritten digits, 8 x 8 pixels: the 1,797 images that scikit-learn carries, for an experiment of seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from pydantic import Field

from leansurgeon.tasks import base
from leansurgeon.tasks import cache as disk
from leansurgeon.tasks.images.small import SmallImages

EVAL_IMAGES = 360


class Options(base.Options):
    """The split is stratified by digit: 1,437 images to train on, 360 to evaluate."""

    split_seed: int = Field(0, ge=0)


class Digits(SmallImages):
    """Ten-way classification of (1, 8, 8) images whose grey values 0..16 are scaled to -1..1; no augmentation."""

    name = "digits"
    Options = Options
    source = "Optical recognition of handwritten digits (Alpaydin and Kaynak, UCI 1998), from scikit-learn"
    licence = "CC BY 4.0"
    side = 8

    def prepare(self, cache: Path, model_dir: Path | None, *, workers: int, say: Callable[[str], None]) -> None:
        """Split scikit-learn's digits by `split_seed` and keep them as arrays."""
        key = {"version": 1, "split_seed": self.options.split_seed}
        self._open(disk.entry(cache, "digits", key, lambda folder: _split(folder, self.options.split_seed)))

    def standardised(self, images: np.ndarray) -> np.ndarray:
        """From -1 to 1."""
        return images.astype(np.float32) / 8 - 1


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
