"""ImageNet and any other labelled image files: class folders, webdataset shards, parquet files, the hub.

Cropping, flipping, RandAugment, colour jitter and random erasing are timm's (`timm.data.create_transform`), as in the
paper's training script; mixup, cutmix and label smoothing act on whole batches and belong to the recipe's `train`.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from leansurgeon.errors import UsageError, plural
from leansurgeon.progress import Say
from leansurgeon.tasks import base, chance, classes, disk_cache, splits, user_data
from leansurgeon.tasks.images import files as image_files
from leansurgeon.tasks.images import places

if TYPE_CHECKING:
    from torch import Tensor

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet-1k, with pixels in 0..1
_VERSION = 4
Interpolation = Literal["random", "bilinear", "bicubic", "nearest", "lanczos"]


class Options(base.Options):
    """Options of tasks on image files.

    `data`: a folder with `train/CLASS/`, `val/CLASS/` and `test/CLASS/`, one folder of classes, shards
    (`/data/imagenet-*.tar`), parquet files, or `hub:timm/mini-imagenet`; `eval_data` if the evaluation split is
    elsewhere. Splits that the data lacks are cut from its training images by content, unless `hold_out: false`. Images
    that cannot be read are an error, or are skipped with `skip_damaged: true`.

    `class_names`: the data's classes in the order of the model's outputs, if that differs from the data's. `label`: the
    column, if a parquet file has several. `mean` and `std` default to ImageNet's (0.5 for one channel). `auto_augment`
    is timm's text (`rand-m9-mstd0.5`); while it is set, timm ignores `color_jitter`.
    """

    data: str
    eval_data: str | None = None
    hold_out: bool = True
    skip_damaged: bool = False
    label: str | None = None
    classes: int | None = Field(None, ge=2)
    class_names: base.Names = None
    train_samples: base.Count = None
    eval_samples: base.Count = None
    image_size: int = Field(224, ge=4)
    channels: Literal[1, 3] = 3
    mean: list[float] | None = None
    std: list[float] | None = None
    crop_pct: float = Field(0.875, gt=0, le=1)
    interpolation: Interpolation = "bicubic"
    augment: bool = True
    crop_scale: tuple[float, float] = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    train_interpolation: Interpolation = "random"
    hflip: float = Field(0.5, ge=0, le=1)
    color_jitter: float = Field(0.4, ge=0)
    auto_augment: str | None = None
    random_erase: float = Field(0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _of_pixels(self) -> Options:
        """Check that mean and std fit pixels in 0..1 and the channels, and that crops have an area."""
        for key, (low, high) in (("crop_scale", self.crop_scale), ("crop_ratio", self.crop_ratio)):
            if not 0 < low <= high:
                raise ValueError(f"{key} [{low:g}, {high:g}] must rise, from above 0")
        for name in ("mean", "std"):
            values = getattr(self, name)
            if values is not None and len(values) != self.channels:
                raise ValueError(f"{name} has {len(values)} numbers and the images have {self.channels} channels")
        if self.mean is not None and not all(0 <= value <= 1 for value in self.mean):
            raise ValueError(f"mean {self.mean} is not within 0..1, as pixels are (not 0..255)")
        if self.std is not None and not all(0 < value <= 1 for value in self.std):
            raise ValueError(f"std {self.std} is not above 0 and at most 1 (pixels are in 0..1, not 0..255)")
        return self


class ImageFolder(base.Task):
    """Classification of (3, image_size, image_size) images by top-1 accuracy; top-5 is reported as well."""

    name = "folder"
    head = "image-classification"
    metric = base.TOP_1
    Options = Options
    draws_globally = True  # transforms of timm and torchvision

    def prepare(self, cache: Path, model_dir: Path | None, *, workers: int, say: Say) -> None:
        """List the images and their classes in the cache once; the images stay where they are."""
        o = self.options
        self.source = o.data
        try:  # before any data is read: timm parses `auto_augment` with assertions
            transform(o, o.augment)
        except (AssertionError, ValueError, TypeError, KeyError, IndexError) as error:
            said = f": {error}" if str(error) else ""
            raise UsageError(
                f"timm cannot make the augmentation with auto_augment '{o.auto_augment}'{said}.",
                "An example of its texts: rand-m9-mstd0.5.",
            ) from error
        source = places.find(o.data, o.eval_data)
        if not o.hold_out and "eval" not in source.places and "test" in source.places:
            source.places["eval"] = source.places.pop("test")
        key = {"version": _VERSION, **source.key(), "label": o.label, "classes": o.classes}
        if o.hold_out:  # every image is decoded, and again if its file has changed
            key |= {"split": splits.RULE, "files": source.file_stamps(), "skip_damaged": o.skip_damaged}

        def build(folder: Path) -> disk_cache.Info:
            say(f"{self.name}: looking through {o.data}")
            info = image_files.build(source, folder, o.label, o.classes, say)
            parted = image_files.split(folder, info, workers, skip_damaged=o.skip_damaged) if o.hold_out else None
            return info | (parted or {"stored": {}})

        self._open(cache, "images", key, build)
        if damaged := self._info.get("damaged"):
            say(f"{self.name}: {plural(len(damaged), 'damaged image')} left out. {damaged[0]}")
        self._rows = self._choose_samples()
        named = {self._info["stored"].get(split, split) for split in self._info["sizes"]}
        stored = np.concatenate([self._array(f"{split}-labels") for split in named])
        numbers, counts = np.unique(stored, return_counts=True)
        self._stored_classes = classes.StoredClasses(
            self._info["labels"], numbers, o.class_names, ordered=self._info["ordered"]
        )
        shares = dict(zip(self._stored_classes.labels, counts[numbers >= 0].tolist(), strict=True))
        where = ["class folders" if source.kind == "folder" else "as the data says"] if shares else []
        total = {"images": int(counts.sum()), "of them damaged": len(self._info.get("damaged") or ())}
        self.was_read = user_data.tell([Path(o.data).name], total, [("label", where)], where, shares)

    def _choose_samples(self) -> dict[str, np.ndarray]:
        """Return the rows of each split: all on its side, or as few as the options allow."""
        o, sizes = self.options, self._info["sizes"]
        if "eval" not in sizes:
            raise UsageError(
                f"{o.data} has no images to evaluate on.",
                "Name them: task.eval_data; or hold some out: task.hold_out=true.",
            )
        parted = self._info["stored"]
        rows = {split: self._array(f"{split}-rows") if parted else np.arange(there) for split, there in sizes.items()}
        for split, limit in (("train", o.train_samples), ("eval", o.eval_samples)):
            there = sizes[split]
            if limit is not None and limit > there:
                raise UsageError(f"{o.data} holds {there:,} {split} images where {split}_samples asks for {limit:,}.")
            if limit is not None and limit < there:
                # The first samples would all be of the first classes.
                order = np.random.default_rng([0, split == "eval"]).permutation(there)[:limit]
                rows[split] = rows[split][np.sort(order)]
        return rows

    def size(self, split: str) -> int:
        """Return the number of images of a split that the options select."""
        split = self._check_split(split)  # raises if nothing is prepared, before rows are read
        return len(self._rows[split])

    def batch(self, split: str, indices: np.ndarray, *, seed: int, epoch: int) -> base.Batch:
        """Return `pixel_values` (B, C, H, W), cropped and standardised by the options, and `labels` (B,)."""
        import torch

        indices = self._indices(split, indices)
        rows = self._rows[split][indices]
        stored = self._info["stored"].get(split, split)
        reader = image_files.Reader(self._folder, stored, self._array)
        prepare = transform(self.options, split == "train" and self.options.augment)
        mode = "RGB" if self.options.channels == 3 else "L"
        if split != "train":
            seed, epoch = 0, 0
        # Close it at once if an image cannot be read: other threads wait for the generators.
        with closing(chance.seed_each(seed, epoch, indices)) as places:
            pixels = [prepare(reader.decode(int(rows[place]), mode)) for place in places]
        labels = self._array(f"{stored}-labels")[rows].astype(np.int64)
        labels = self._stored_classes.outputs_of(labels)
        return {"pixel_values": torch.stack(pixels), "labels": torch.from_numpy(labels)}

    def score(self, logits: Tensor, batch: base.Batch, *, label_smoothing: float = 0.0) -> base.Score:
        """Return cross-entropy and top-1, with top-5 and the confusion matrix in `extra`."""
        import torch

        labels = batch["labels"]
        made = base.classification_score(logits, labels, label_smoothing, top=5)
        if labels.dim() > 1 or self.extra_sums == 1:  # class shares occur in training only
            return made
        cells = base.confusion(logits.argmax(-1), labels, logits.shape[-1])
        return made._replace(extra=torch.cat([made.extra, cells]))

    @property
    def extra_sums(self) -> int:
        """The number of samples whose class is among the five best, and the confusion matrix."""
        return 1 + base.cells_of(self._outputs)

    def metric_value(self, sums: base.Sums) -> base.Metrics:
        """Return top-1 accuracy, top-5 accuracy and macro F1."""
        top5 = {"top5": float(sums.extra[0]) / max(sums.metric_count, 1)}
        return super().metric_value(sums) | top5 | base.of_confusion(sums.extra[1:])

    def model_overrides(self) -> base.Overrides:
        """Return number and names of the classes, image size and channels."""
        o = self.options
        head = {"num_labels": self._outputs} if self._info["classes"] > 0 else {}  # otherwise no head is requested
        if head and o.class_names:
            head["id2label"] = dict(enumerate(o.class_names))
        return head | {"image_size": o.image_size, "num_channels": o.channels}

    @property
    def _outputs(self) -> int:
        return len(self.options.class_names or ()) or self._info.get("classes", 0)

    def _particulars(self) -> base.Description:
        damaged = {"damaged": len(self._info["damaged"])} if self._info.get("damaged") else {}
        return {"classes": self._info["classes"], **damaged}


class PublishedOptions(Options):
    """The options of `ImageFolder`, by default with the data's own splits, on which published figures are measured."""

    hold_out: bool = False


class ImageNet(ImageFolder):
    """ImageNet-1k (Russakovsky et al., 2015): `ImageFolder` with the name and licence of the source."""

    name = "imagenet"
    Options = PublishedOptions
    licence = "ImageNet terms of access: non-commercial research and education"


class Images(base.Embedded, ImageFolder):
    """Images of a folder, with or without class folders, for a backbone without a head.

    It is trained to reproduce its source's embeddings; classes are ignored.
    """

    name = "images"

    def batch(self, split: str, indices: np.ndarray, *, seed: int, epoch: int) -> base.Batch:
        """Return the batch of `ImageFolder` with all labels 0."""
        batch = super().batch(split, indices, seed=seed, epoch=epoch)
        return batch | {"labels": batch["labels"] * 0}

    def model_overrides(self) -> base.Overrides:
        """Return size and channels of the images."""
        return {key: value for key, value in super().model_overrides().items() if key not in ("num_labels", "id2label")}


def transform(options: Options, augmented: bool) -> Any:
    """Return timm's transform from a PIL image to a standardised (channels, size, size) fp32 tensor."""
    from timm.data import create_transform

    o = options
    one = o.channels == 1
    common = {
        "input_size": (o.channels, o.image_size, o.image_size),
        "mean": tuple(o.mean or ((0.5,) if one else MEAN)),
        "std": tuple(o.std or ((0.5,) if one else STD)),
    }
    if not augmented:
        return create_transform(**common, is_training=False, interpolation=o.interpolation, crop_pct=o.crop_pct)
    return create_transform(
        **common,
        is_training=True,
        scale=o.crop_scale,
        ratio=o.crop_ratio,
        hflip=o.hflip,
        color_jitter=o.color_jitter,
        auto_augment=o.auto_augment,
        interpolation=o.train_interpolation,
        re_prob=o.random_erase,
        re_mode="pixel",
    )
