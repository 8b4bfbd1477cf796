"""CIFAR-10: 60,000 colour images of 32 x 32 pixels in ten classes (Krizhevsky, 2009), from the hub's parquet files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from leansurgeon.errors import UsageError
from leansurgeon.progress import Say
from leansurgeon.reading.files import in_home
from leansurgeon.reading.images import decode
from leansurgeon.tasks import base, disk_cache, hub
from leansurgeon.tasks.images import files as image_files
from leansurgeon.tasks.images import places as image_places
from leansurgeon.tasks.images.small import SmallImages

HUB = "hub:uoft-cs/cifar10"
BY_HAND = "Download its parquet files on another machine and name their folder with the task's option `data`."
SPLITS = {"train": "train", "eval": "test"}  # evaluated on the published test set


class Options(base.Options):
    """Options of `cifar10`.

    `data`: the hub's parquet files (their folder), or `hub:uoft-cs/cifar10`. Fewer samples take the first of each
    split.
    """

    data: str = HUB
    train_samples: int | None = Field(None, ge=1)
    eval_samples: int | None = Field(None, ge=1)
    augment: bool = True


class Cifar10(SmallImages, base.Shortened):
    """Ten-way classification of standardised (3, 32, 32) images.

    Training images are shifted by up to 4 pixels each way and flipped.
    """

    name = "cifar10"
    Options = Options
    source = "CIFAR-10 (Krizhevsky, 2009), its published split"
    licence = "none stated by its authors"
    side, channels, shift = 32, 3, 4
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the training images, with pixels in 0..1

    def prepare(self, cache: Path, model_dir: Path | None, *, workers: int, say: Say) -> None:
        """Read the images into the cache once."""
        self._open(cache, "cifar10", *entry(self.options.data, say))
        self._check_limits("CIFAR-10", "images")


def entry(data: str, say: Say) -> tuple[dict[str, Any], Callable[[Path], disk_cache.Info]]:
    """Return key and builder of the cache entry of these files.

    The entry has `train-images`, `train-labels`, `eval-images` and `eval-labels`. Raises UsageError if the files are
    not CIFAR-10 or cannot be fetched.
    """
    kind, places = find(data)
    key = {"version": 1, "files": {split: list(map(image_places.stamp, some)) for split, some in places.items()}}

    def build(folder: Path) -> disk_cache.Info:
        say(f"cifar10: reading {data}")
        sizes = {}
        for split, some in places.items():
            images, labels = _read(kind, some)
            np.save(folder / f"{split}-images.npy", images)
            np.save(folder / f"{split}-labels.npy", labels)
            sizes[split] = len(labels)
        return {"sizes": sizes}

    return key, build


def find(data: str) -> tuple[str, dict[str, list[Any]]]:
    """Return "hub" or "parquet", and by split the data set of the hub or the files that `data` names."""
    if named := hub.parse(data):
        return "hub", {split: [hub.load(*named, word, by_hand=BY_HAND)] for split, word in SPLITS.items()}
    folder = in_home(data).absolute()
    parts = image_places.parts_by_name(sorted(folder.rglob("*.parquet")), folder)
    if not {"train", "test"} <= parts.keys():
        raise UsageError(f"CIFAR-10 is not in {data}: no train and test files (*.parquet) there.", BY_HAND)
    return "parquet", {split: parts[word] for split, word in SPLITS.items()}


def _read(kind: str, places: list[Any]) -> tuple[np.ndarray, np.ndarray]:
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
