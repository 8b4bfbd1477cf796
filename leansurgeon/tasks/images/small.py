"""Small data sets of ten classes that are cached as a whole: scikit-learn's digits, Fashion-MNIST and CIFAR-10."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy import ndarray
from pydantic import Field

from leansurgeon.errors import UsageError
from leansurgeon.progress import Say
from leansurgeon.reading import archives, files
from leansurgeon.reading.images import decode
from leansurgeon.tasks import base, chance, disk_cache, hub
from leansurgeon.tasks.images import files as image_files
from leansurgeon.tasks.images import places as image_places

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
    train_samples: base.Count = None
    eval_samples: base.Count = None
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


# -- CIFAR-10 (Krizhevsky, 2009): 60,000 colour images, from the hub's parquet files ---------------

CIFAR = "hub:uoft-cs/cifar10"
BY_HAND = "Download its parquet files on another machine and name their folder with the task's option `data`."


class CifarOptions(base.Options):
    """Options of `cifar10`.

    `data`: the hub's parquet files (their folder), or `hub:uoft-cs/cifar10`. Fewer samples take the first of each
    split.
    """

    data: str = CIFAR
    train_samples: base.Count = None
    eval_samples: base.Count = None
    augment: bool = True


class Cifar10(SmallImages, base.Shortened):
    """Ten-way classification of standardised (3, 32, 32) images.

    Training images are shifted by up to 4 pixels each way and flipped.
    """

    name = "cifar10"
    Options = CifarOptions
    source = "CIFAR-10 (Krizhevsky, 2009), its published split"
    licence = "none stated by its authors"
    side, channels, shift = 32, 3, 4
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the training images, with pixels in 0..1

    def prepare(self, cache: Path, model_dir: Path | None, *, workers: int, say: Say) -> None:
        """Read the images into the cache once."""
        self._open(cache, "cifar10", *cifar_entry(self.options.data, say))
        self._check_limits("CIFAR-10", "images")


def cifar_entry(data: str, say: Say) -> tuple[dict[str, Any], Callable[[Path], disk_cache.Info]]:
    """Return key and builder of the cache entry of these files.

    The entry has `train-images`, `train-labels`, `eval-images` and `eval-labels`. Raises UsageError if the files are
    not CIFAR-10 or cannot be fetched.
    """
    words = {"train": "train", "eval": "test"}  # evaluated on the published test set
    if named := hub.parse(data):
        kind, places = "hub", {split: [hub.load(*named, word, by_hand=BY_HAND)] for split, word in words.items()}
    else:
        folder = files.in_home(data).absolute()
        parts = image_places.parts_by_name(sorted(folder.rglob("*.parquet")), folder)
        if not {"train", "test"} <= parts.keys():
            raise UsageError(f"CIFAR-10 is not in {data}: no train and test files (*.parquet) there.", BY_HAND)
        kind, places = "parquet", {split: parts[word] for split, word in words.items()}
    key = {"version": 1, "files": {split: list(map(image_places.stamp, some)) for split, some in places.items()}}

    def build(folder: Path) -> disk_cache.Info:
        say(f"cifar10: reading {data}")
        sizes = {}
        for split, some in places.items():
            images, labels = _read_cifar(kind, some)
            np.save(folder / f"{split}-images.npy", images)
            np.save(folder / f"{split}-labels.npy", labels)
            sizes[split] = len(labels)
        return {"sizes": sizes}

    return key, build


def _read_cifar(kind: str, places: list[Any]) -> tuple[ndarray, ndarray]:
    """Return (N, 32, 32, 3) images and (N,) labels, both uint8."""
    pictures, labels = [], []
    for content, label in image_files.rows_of(kind, places, None)[1]:
        image = np.asarray(decode(content, "RGB", f"An image of {places[0]}"))
        if image.shape != (32, 32, 3) or label not in range(10):
            shape = f"{image.shape[1]} x {image.shape[0]} pixels, labelled {label}"
            raise UsageError(f"{places[0]} holds an image of {shape}; CIFAR-10 has 32 x 32 and the labels 0 to 9.")
        pictures.append(image)
        labels.append(label)
    return np.stack(pictures), np.array(labels, dtype=np.uint8)
