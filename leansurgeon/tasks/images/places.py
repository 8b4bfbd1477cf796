"""Where the images of a data set lie: class folders, webdataset shards, parquet files, or a data set of the hub."""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leansurgeon.errors import LeanSurgeonError, UsageError
from leansurgeon.reading import files
from leansurgeon.tasks import hub

if TYPE_CHECKING:
    from datasets import Dataset

SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff"))
TRAIN = ("train", "training")
EVAL = ("val", "validation", "valid", "eval", "dev", "test")  # the first that is there


@dataclass(frozen=True)
class ImagePlaces:
    """What a recipe's `data` turned out to be. `places[split]` are folders of classes, shards, parquet files or one
    loaded hub data set.
    """

    kind: str  # "folder", "flat", "tar", "parquet" or "hub"
    places: dict[str, list[Any]]

    def key(self) -> dict[str, Any]:
        """What stands for the content in a cache key: names, sizes and times, since hashing 140 GB takes too long."""
        return {
            "kind": self.kind,
            "places": {split: [stamp(p) for p in places] for split, places in self.places.items()},
        }


def find(data: str, eval_data: str | None) -> ImagePlaces:
    """Folders, shards, parquet files or hub data set that `data` (and `eval_data`) name.

    Raises UsageError where there are none, or none to evaluate on. One folder of classes without a split is "train"
    alone: the caller holds some out.
    """
    if hub.parse(data):
        return _find_hub(data)
    train = _expand(data)
    if eval_data is not None:
        other = _expand(eval_data)
        kind, places = _kind_of(train, data), {"train": train, "eval": other}
        if _kind_of(other, eval_data) != kind:
            raise UsageError(f"'{data}' and '{eval_data}' hold images in two different ways.", "Give one kind.")
        return ImagePlaces(kind, places)
    root = train[0]
    if len(train) == 1 and root.is_dir():
        split = {os.path.basename(path).lower(): Path(path) for path in listing(str(root)).folders}
        folders = [next((split[n] for n in names if n in split), None) for names in (TRAIN, EVAL)]
        if all(folders) and _kind_of([folders[0]], data) in ("folder", "flat"):
            return ImagePlaces(_kind_of([folders[0]], data), {"train": [folders[0]], "eval": [folders[1]]})
        for suffix, kind in ((".tar", "tar"), (".parquet", "parquet")):
            files = sorted(root.rglob(f"*{suffix}"))
            if files:
                return ImagePlaces(kind, _by_name(files, root))
        if folders[0] is None and folders[1] is None:
            return ImagePlaces(_kind_of([root], data), {"train": [root]})
        missing = "val" if folders[0] else "train"
        raise UsageError(f"{root} has {'train' if folders[0] else folders[1].name} and no folder {missing} beside it.")
    return ImagePlaces(_kind_of(train, data), _by_name(train, Path()))


def _expand(text: str) -> list[Path]:
    path = Path(text).expanduser()
    paths = [path] if os.path.exists(path) else sorted(map(Path, glob.glob(str(path), recursive=True)))
    if not paths:
        hint = (
            "Give a folder with train/CLASS/*.jpg and val/CLASS/*.jpg, webdataset shards (*.tar), parquet files of the "
            "hub, or hub:OWNER/NAME."
        )
        raise UsageError(f"No images are at '{text}'.", hint)
    return [p.absolute() for p in paths]


def _find_hub(data: str) -> ImagePlaces:
    name, config = hub.parse(data)
    by_hand = "Download its parquet files on another machine and name their folder with the task's option `data`."
    train = hub.load(name, config, "train", by_hand=by_hand)
    for split in ("validation", "test"):
        try:
            return ImagePlaces("hub", {"train": [train], "eval": [hub.load(name, config, split, by_hand=by_hand)]})
        except LeanSurgeonError:
            continue
    return ImagePlaces("hub", {"train": [train]})


def _kind_of(paths: list[Path], said: str) -> str:
    suffixes = {path.suffix for path in paths if path.is_file()}
    if suffixes == {".tar"}:
        return "tar"
    if suffixes == {".parquet"}:
        return "parquet"
    if suffixes or len(paths) != 1:
        raise UsageError(f"'{said}' is neither a folder nor .tar shards nor .parquet files.")
    return "folder" if listing(str(paths[0])).folders else "flat"


def _by_name(files: list[Path], root: Path) -> dict[str, list[Path]]:
    """Shards or parquet files by the word for their split in the name, or in the folders between it and `root`."""
    places: dict[str, list[Path]] = {}
    for path in files:
        words = re.split(r"[^a-z]+", str(path.relative_to(root) if root != Path() else path.name).lower())
        split = next((word for word in (*TRAIN, *EVAL) if word in words), "train")
        places.setdefault("train" if split in TRAIN else split, []).append(path)
    evaluation = next((places[name] for name in EVAL if name in places), None)
    if "train" not in places:
        raise UsageError(f"{files[0].parent} has {files[0].name} and no training files ('train' in the name).")
    return {"train": places["train"], **({"eval": evaluation} if evaluation else {})}


def stamp(place: Path | Dataset) -> list[Any]:
    """What stands for the content of a file, folder or hub data set without reading it all: sizes and times, or a
    digest.
    """
    if not isinstance(place, Path):
        return [hub.digest(place)]
    stat = place.stat()
    if place.is_file():
        return [str(place), stat.st_size, stat.st_mtime_ns]
    # A folder's time changes when a file comes or goes in it, not below it; what is in a file is read anew anyway.
    return [str(place), stat.st_mtime_ns, _times_below(place)]


def _times_below(folder: Path | str) -> list[tuple[str, int]]:
    """(path, time of change in ns) of every folder below this one, sorted: what `_images_in` descends into."""
    inner = sorted((path, os.stat(path).st_mtime_ns) for path in listing(str(folder)).folders)
    return [row for path, time_ns in inner for row in ((path, time_ns), *_times_below(path))]


@dataclass(frozen=True)
class Listing:
    """What a folder holds, each sorted by path."""

    folders: list[str]
    images: list[str]


def listing(folder: str) -> Listing:
    """Folders and images in a folder; what is hidden, and what is neither, is passed over. Links to folders are
    followed. Raises UsageError for a link that leads back to a folder above it, which would have no end, and for a
    folder that cannot be read.
    """
    folders, images = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda e: e.name):
                if entry.is_dir():
                    if entry.is_symlink() and Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(entry)):
                        raise UsageError(f"The link {entry.path} leads back to a folder that it lies in.")
                    folders.append(entry.path)
                elif os.path.splitext(entry.name)[1].lower() in SUFFIXES and entry.name[0] != "." and entry.is_file():
                    images.append(entry.path)
    except OSError as error:
        raise UsageError(f"The folder {error.filename or folder} cannot be read: {files.why(error)}.") from None
    return Listing(folders, images)
