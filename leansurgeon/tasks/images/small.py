"""Small images that lie in the cache as a whole, in ten classes."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np

from leansurgeon.tasks import base, chance


class SmallImages(base.Task):
    """Classification of (`channels`, `side`, `side`) images. The cache holds `images` and `labels` of each split, of
    uint8; with the option `augment` those of training are moved by up to `shift` pixels each way and mirrored.
    """

    head = "image-classification"
    metric = base.Metric("accuracy", "top-1 accuracy", higher_is_better=True, percent=True)
    side: ClassVar[int]
    channels: ClassVar[int] = 1
    shift: ClassVar[int] = 0

    @abstractmethod
    def standardised(self, images: np.ndarray) -> np.ndarray:
        """Pixels as the model is to see them, fp32, from those in the cache."""

    def batch(self, split: str, indices: np.ndarray, *, seed: int, epoch: int) -> base.Batch:
        """`pixel_values` (B, channels, side, side), standardised, and `labels` (B,)."""
        import torch

        indices = self._indices(split, indices)
        images = self._array(f"{split}-images")[indices]
        if split == "train" and self.shift and self.options.augment:
            images = shifted(images, seed, epoch, indices, self.shift)
        pixels_BHWC = self.standardised(images).reshape(-1, self.side, self.side, self.channels)
        pixels = np.ascontiguousarray(pixels_BHWC.transpose(0, 3, 1, 2))
        labels = self._array(f"{split}-labels")[indices].astype(np.int64)
        return {"pixel_values": torch.from_numpy(pixels), "labels": torch.from_numpy(labels)}

    def model_overrides(self) -> base.Overrides:
        """Ten classes, the size of the images and their channels."""
        return {"num_labels": 10, "image_size": self.side, "num_channels": self.channels}


def shifted(images_BHWC: np.ndarray, seed: int, epoch: int, indices_B: np.ndarray, most: int) -> np.ndarray:
    """Each image moved by -most..most pixels in both directions, the gap black (0), and mirrored in half of the cases.
    Grey images may come without the last axis.
    """
    height, width = images_BHWC.shape[1:3]
    draws_B3 = chance.uniform(seed, epoch, indices_B, 3)
    down_B1, right_B1 = ((draws_B3[:, :2] * (2 * most + 1)).astype(np.int64))[:, :, None].swapaxes(0, 1)
    columns_BW = right_B1 + np.arange(width)
    columns_BW = np.where(draws_B3[:, 2:] < 0.5, columns_BW, columns_BW[:, ::-1])
    rows_BH = down_B1 + np.arange(height)
    edges = ((0, 0), (most, most), (most, most), *((0, 0),) * (images_BHWC.ndim - 3))
    wide = np.pad(images_BHWC, edges)
    return wide[np.arange(len(wide))[:, None, None], rows_BH[:, :, None], columns_BW[:, None, :]]
