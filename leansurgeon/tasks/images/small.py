"""Small data sets of ten classes that are cached as a whole: scikit-learn's digits and Fashion-MNIST."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy import ndarray
from pydantic import Field

from leansurgeon.errors import UsageError
from leansurgeon.progress import Say
from leansurgeon.reading import archives, files
from leansurgeon.tasks import base, chance, disk_cache

EVAL_IMAGES = 360  # of the digits
DEBIAN_FOLDER = "/usr/share/datasets/fashion-mnist"
FILES = {"train": "train", "eval": "t10k"}
_UNSIGNED_BYTE = 0x08  # type code in idx files
LARGEST = 200_000_000  # bytes of an idx file; the MNIST family has 47 million


class SmallImages(base.Task):
    """Classification of (`channels`, `side`, `side`) images.

    The cache holds `images` and `labels` of each split as uint8. With the option `augment`, training images are shifted
    by up to `shift` pixels each way and flipped.
    """

    head = "image-classification"
    metric = base.TOP_1
    side: ClassVar[int]
    channels, shift = 1, 0
    scale = 255  # pixels are divided by this, then standardised with `mean` and `std`

    def batch(self, split: str, indices: ndarray, *, seed: int, epoch: int) -> base.Batch:
        """Return standardised `pixel_values` (B, channels, side, side) and `labels` (B,)."""
        indices = self._indices(split, indices)
        images = self._array(f"{split}-images")[indices]
        if split == "train" and self.shift and self.options.augment:
            images = shift_images(images, seed, epoch, indices, self.shift)
        standard = (images.astype(np.float32) / self.scale - np.float32(self.mean)) / np.float32(self.std)
        pixels_BHWC = standard.reshape(-1, self.side, self.side, self.channels)
        pixels = np.ascontiguousarray(pixels_BHWC.transpose(0, 3, 1, 2))
        labels = self._array(f"{split}-labels")[indices].astype(np.int64)
        return base.as_tensors(pixel_values=pixels, labels=labels)

    def model_overrides(self) -> base.Overrides:
        """Return ten classes, and size and channels of the images."""
        return {"num_labels": 10, "image_size": self.side, "num_channels": self.channels}


def shift_images(images_BHWC: ndarray, seed: int, epoch: int, indices_B: ndarray, most: int) -> ndarray:
    """Shift each image by -most..most pixels in both directions, filling with black (0), and flip half of them.

    Grey images may lack the last axis.
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


# -- digits ------------------------------------------------------------------------------------------


class DigitsOptions(base.Options):
    """The split is stratified by digit: 1,437 images for training, 360 for evaluation."""

    split_seed: int = Field(0, ge=0)


class Digits(SmallImages):
    """Ten-way classification of scikit-learn's 1,797 handwritten digits, for experiments of seconds.

    Images are (1, 8, 8) with grey values 0..16 scaled to -1..1; no augmentation.
    """

    name = "digits"
    Options = DigitsOptions
    source = "Optical recognition of handwritten digits (Alpaydin and Kaynak, UCI 1998), from scikit-learn"
    licence = "CC BY 4.0"
    side, scale, mean, std = 8, 8, 1, 1

    def prepare(self, cache: Path, model_dir: Path | None, *, workers: int, say: Say) -> None:
        """Split scikit-learn's digits by `split_seed` and store them as arrays."""
        seed = self.options.split_seed

        def build(folder: Path) -> disk_cache.Info:
            from sklearn.datasets import load_digits
            from sklearn.model_selection import train_test_split

            data, sizes = load_digits(), {}
            images, labels = data.images.astype(np.uint8), data.target.astype(np.uint8)
            parts = train_test_split(np.arange(len(labels)), test_size=EVAL_IMAGES, random_state=seed, stratify=labels)
            for name, rows in zip(base.SPLITS, parts, strict=True):
                np.save(folder / f"{name}-images.npy", images[rows])
                np.save(folder / f"{name}-labels.npy", labels[rows])
                sizes[name] = len(rows)
            return {"sizes": sizes}

        self._open(cache, "digits", {"version": 1, "split_seed": seed}, build)


# -- Fashion-MNIST (Xiao, Rasul, Vollgraf, arXiv:1708.07747) --------------------------------------


class FashionOptions(base.Options):
    """`data`: the folder of the four idx files, compressed or not. Fewer samples take the first of each file."""

    data: str = DEBIAN_FOLDER
    train_samples: int | None = Field(None, ge=1)
    eval_samples: int | None = Field(None, ge=1)
    augment: bool = True


class FashionMnist(SmallImages, base.Shortened):
    """Ten-way classification of standardised (1, 28, 28) images.

    Training images are shifted by up to 2 pixels each way and flipped.
    """

    name = "fashion-mnist"
    Options = FashionOptions
    source = "Fashion-MNIST (Xiao, Rasul, Vollgraf, 2017), its published split"
    licence = "MIT"
    side, shift, mean, std = 28, 2, 0.2860, 0.3530  # of the training images, with pixels in 0..1

    def prepare(self, cache: Path, model_dir: Path | None, *, workers: int, say: Say) -> None:
        """Read the four published idx files into the cache once."""
        o = self.options
        paths = {(split, kind): _find(Path(o.data), split, kind) for split in FILES for kind in ("images", "labels")}
        # Size and time identify the content: hashing 30 MB at every start would cost too much.
        stamps = {str(path): [path.stat().st_size, path.stat().st_mtime_ns] for path in paths.values()}

        def build(folder: Path) -> disk_cache.Info:
            say(f"fashion-mnist: reading {o.data}")
            sizes = {}
            for split in FILES:
                image_path, label_path = paths[split, "images"], paths[split, "labels"]
                images, labels = read_idx(image_path, (28, 28)), read_idx(label_path, ())
                if len(images) != len(labels):
                    raise UsageError(
                        f"{image_path} holds {len(images):,} images and {label_path} {len(labels):,} labels."
                    )
                np.save(folder / f"{split}-images.npy", images)
                np.save(folder / f"{split}-labels.npy", labels)
                sizes[split] = len(labels)
            return {"sizes": sizes}

        self._open(cache, "fashion-mnist", {"version": 1, "files": stamps}, build)
        self._check_limits("Fashion-MNIST", "images")


def _find(folder: Path, split: str, kind: str) -> Path:
    name = f"{FILES[split]}-{kind}-idx{3 if kind == 'images' else 1}-ubyte"
    for path in (folder / f"{name}.gz", folder / name):
        if path.is_file():
            return path
    hint = (
        "On Debian or Ubuntu: apt-get install dataset-fashion-mnist; elsewhere put the four idx files into a folder "
        "and name it with the task's option `data`."
    )
    raise UsageError(f"Fashion-MNIST is not in {folder}: {name}.gz is missing.", hint)


def read_idx(path: Path, shape: tuple[int, ...]) -> ndarray:
    """Return the uint8 array (N, *shape) of an idx file, plain or compressed (name ending in .gz).

    Raises UsageError for a file that holds anything else.
    """
    data = archives.read_gzip(path, LARGEST) if path.suffix == ".gz" else files.read_bytes(path, LARGEST)
    start = bytes((0, 0, _UNSIGNED_BYTE, 1 + len(shape)))
    header = struct.calcsize(f">{1 + len(shape)}I")
    count, left = divmod(max(0, len(data) - 4 - header), math.prod(shape))
    if left or data[: 4 + header] != start + struct.pack(f">{1 + len(shape)}I", count, *shape):
        what = " x ".join(map(str, ("N", *shape)))
        raise UsageError(f"{path} is truncated, or not an idx file of {what} bytes.")
    return np.frombuffer(data, np.uint8, offset=4 + header).reshape(count, *shape)
