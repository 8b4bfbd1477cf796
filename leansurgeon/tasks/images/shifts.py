"""The augmentation of small images: moved by a few pixels, and mirrored in half of the cases."""

from __future__ import annotations

import numpy as np

from leansurgeon.tasks import chance


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
