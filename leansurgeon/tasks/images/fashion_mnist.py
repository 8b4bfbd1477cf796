"""Fashion-MNIST: 70,000 grey images of clothes, 28 x 28 pixels (Xiao, Rasul, Vollgraf, arXiv:1708.07747), from its
idx files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from pydantic import Field

from leansurgeon.errors import UsageError
from leansurgeon.tasks import base
from leansurgeon.tasks import cache as disk
from leansurgeon.tasks.images import idx
from leansurgeon.tasks.images.small import SmallImages

DEBIAN_FOLDER = "/usr/share/datasets/fashion-mnist"
FILES = {"train": "train", "eval": "t10k"}
MEAN, STD = 0.2860, 0.3530  # of the training images, with pixels in 0..1


class Options(base.Options):
    """`data`: the folder of the four idx files, compressed or not; fewer samples take the first of each file."""

    data: str = DEBIAN_FOLDER
    train_samples: int | None = Field(None, ge=1)
    eval_samples: int | None = Field(None, ge=1)
    augment: bool = True


class FashionMnist(SmallImages):
    """Ten-way classification of (1, 28, 28) images, standardised; in training shifted by up to 2 pixels each way and
    flipped.
    """

    name = "fashion-mnist"
    Options = Options
    source = "Fashion-MNIST (Xiao, Rasul, Vollgraf, 2017), its published split"
    licence = "MIT"
    side, shift = 28, 2

    def prepare(self, cache: Path, model_dir: Path | None, *, workers: int, say: Callable[[str], None]) -> None:
        """Read the four published idx files into the cache once."""
        o = self.options
        paths = {(split, kind): _find(Path(o.data), split, kind) for split in FILES for kind in ("images", "labels")}
        # Size and time stand for the content: hashing 30 MB at every start would cost more than it guards against.
        stamps = {str(path): [path.stat().st_size, path.stat().st_mtime_ns] for path in paths.values()}
        key = {"version": 1, "files": stamps, "train": o.train_samples, "eval": o.eval_samples}

        def build(folder: Path) -> disk.Info:
            say(f"fashion-mnist: reading {o.data}")
            limits = {"train": o.train_samples, "eval": o.eval_samples}
            return {"sizes": {split: _store(folder, paths, split, limits[split]) for split in FILES}}

        self._open(disk.entry(cache, "fashion-mnist", key, build))

    def standardised(self, images: np.ndarray) -> np.ndarray:
        """By mean and deviation of the training images."""
        return (images.astype(np.float32) / 255 - MEAN) / STD


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


def _store(folder: Path, paths: dict[tuple[str, str], Path], split: str, limit: int | None) -> int:
    image_path, label_path = paths[split, "images"], paths[split, "labels"]
    images, labels = idx.read(image_path, 3), idx.read(label_path, 1)
    if len(images) != len(labels):
        raise UsageError(f"{image_path} holds {len(images):,} images and {label_path} {len(labels):,} labels.")
    if images.shape[1:] != (28, 28):
        raise UsageError(f"{image_path} holds images of {images.shape[1]} x {images.shape[2]} pixels, not 28 x 28.")
    if len(labels) and labels.max() > 9:
        raise UsageError(f"{label_path} holds the label {labels.max()}; Fashion-MNIST has 0 to 9.")
    if limit is not None and limit > len(labels):
        raise UsageError(f"{image_path} holds {len(labels):,} images where {split}_samples asks for {limit:,}.")
    np.save(folder / f"{split}-images.npy", images[:limit])
    np.save(folder / f"{split}-labels.npy", labels[:limit])
    return len(labels[:limit])
