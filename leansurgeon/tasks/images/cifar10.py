"""CIFAR-10: 60,000 colour images of 32 x 32 pixels in ten classes (Krizhevsky, 2009), from its published files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from leansurgeon.errors import UsageError
from leansurgeon.progress import Say
from leansurgeon.reading import archives, files, pickles
from leansurgeon.reading.files import in_home
from leansurgeon.reading.images import decode
from leansurgeon.tasks import base, disk_cache, hub
from leansurgeon.tasks.images import files as image_files
from leansurgeon.tasks.images import places as image_places
from leansurgeon.tasks.images.small import SmallImages

BATCH = 40_000_000  # bytes; the published batches have 31 million
HUB = "hub:uoft-cs/cifar10"
BATCHES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "eval": ["test_batch"]}
ARCHIVES = ("cifar-10-python.tar.gz", "cifar-10-binary.tar.gz", "cifar-10-python.tar", "cifar-10-binary.tar")
BY_HAND = (
    "Download cifar-10-python.tar.gz from www.cs.toronto.edu/~kriz/cifar.html on another machine and name it, or the "
    "folder that it lies in, with the task's option `data`."
)
Split = tuple[np.ndarray, np.ndarray]  # (N, 32, 32, 3) uint8 images, (N,) uint8 labels
Splits = dict[str, Split]


class Options(base.Options):
    """Options of `cifar10`.

    `data`: the published archive (python or binary version) or its folder, the hub's parquet files or their folder,
    or `hub:uoft-cs/cifar10`. Fewer samples take the first of each split.
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
        """Read the published batches, or an image folder with the same split, into the cache once."""
        self._open(cache, "cifar10", *entry(self.options.data, say))
        self._check_limits("CIFAR-10", "images")


def entry(data: str, say: Say) -> tuple[dict[str, Any], Callable[[Path], disk_cache.Info]]:
    """Return key and builder of the cache entry of these files.

    The entry has `train-images`, `train-labels`, `eval-images` and `eval-labels`. Raises UsageError if the files are
    not CIFAR-10, LeanSurgeonError if the hub cannot be reached.
    """
    place = find(data)
    key = {
        "version": 1,
        "files": place.key() if isinstance(place, image_places.ImagePlaces) else image_places.stamp(place),
    }

    def build(folder: Path) -> disk_cache.Info:
        say(f"cifar10: reading {data}")
        splits = _rows(place) if isinstance(place, image_places.ImagePlaces) else _batches(place)
        for split, (images, labels) in splits.items():
            if len(labels) and not np.isin(labels, range(10)).all():
                raise UsageError(f"{data} holds other labels than 0 to 9, which CIFAR-10 has.")
            np.save(folder / f"{split}-images.npy", images)
            np.save(folder / f"{split}-labels.npy", labels.astype(np.uint8))
        return {"sizes": {split: len(labels) for split, (_, labels) in splits.items()}}

    return key, build


def find(data: str) -> Path | image_places.ImagePlaces:
    """Return the archive or folder of batches that `data` names, or parquet files."""
    if named := hub.parse(data):
        theirs = {"train": "train", "eval": "test"}
        splits = {split: [hub.load(*named, name, by_hand=BY_HAND)] for split, name in theirs.items()}
        return image_places.ImagePlaces("hub", splits)
    path = in_home(data)
    if path.is_file():
        return path
    for folder in (path, path / "cifar-10-batches-py", path / "cifar-10-batches-bin"):
        if any((folder / f"test_batch{suffix}").is_file() for suffix in ("", ".bin")):
            return folder
    for name in ARCHIVES:
        if (path / name).is_file():
            return path / name
    if path.is_dir() and any(path.rglob("*.parquet")):
        return image_places.find(data, None)
    raise UsageError(f"CIFAR-10 is not in {data}: no test_batch, {ARCHIVES[0]} or parquet files there.", BY_HAND)


def _rows(source: image_places.ImagePlaces) -> Splits:
    splits = {}
    for split, places in source.places.items():
        rows = image_files.rows_of(source.kind, places, None)[1]
        pictures, labels = [], []
        for content, label in rows:
            image = np.asarray(decode(content, "RGB", f"An image of {places[0]}"))
            if image.shape != (32, 32, 3):
                raise UsageError(f"An image of {image.shape[1]} x {image.shape[0]} pixels; CIFAR-10 has 32 x 32.")
            pictures.append(image)
            labels.append(label)
        splits[split] = np.stack(pictures), np.array(labels)
    if "test" in splits:  # CIFAR-10 is evaluated on the published test set
        splits["eval"] = splits.pop("test")
    if "eval" not in splits:
        raise UsageError("The parquet files have no test split ('test' in the name).", BY_HAND)
    return splits


def _batches(place: Path) -> Splits:
    """Read the batches of the python or binary version from a folder or an archive."""
    wanted = {name + suffix for names in BATCHES.values() for name in names for suffix in ("", ".bin")}
    if place.is_dir():
        contents = {name: files.read_bytes(place / name, BATCH) for name in wanted if (place / name).is_file()}
    else:
        members = archives.members(place, lambda name: Path(name).name in wanted, BATCH)
        contents = {Path(name).name: content for name, content in members}
    splits = {}
    for split, names in BATCHES.items():
        parts = []
        for name in names:
            if name in contents:
                where = f"{place}: {name}"
                batch = pickles.parse_arrays(contents.pop(name), where)
                try:
                    images, labels = np.asarray(batch[b"data"]), np.asarray(batch[b"labels"])
                except (KeyError, TypeError, ValueError, OverflowError) as error:
                    raise UsageError(f"{where} is not a batch of CIFAR-10: {error}.") from None
                if images.dtype != np.uint8 or images.ndim != 2 or images.shape != (len(labels), 3072):
                    told = f"images {images.shape} and {len(labels)} labels, not (N, 3072) bytes"
                    raise UsageError(f"{where} holds {told}.")
                parts.append((images, labels))
                continue
            content = contents.pop(f"{name}.bin", None)
            if content is None:
                raise UsageError(f"CIFAR-10 in {place} is not complete: {name} is missing.", BY_HAND)
            if not content or len(content) % 3073:
                raise UsageError(f"{place}: {name}.bin is truncated: {len(content):,} bytes are no multiple of 3,073.")
            rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, 3073)
            parts.append((rows[:, 1:], rows[:, 0]))
        images, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
        splits[split] = images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels
    return splits
