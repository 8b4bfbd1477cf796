"""Locate the images of a data set: class folders, webdataset shards, parquet files, or a data set of the hub."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from leansurgeon.errors import LeanSurgeonError, UsageError
from leansurgeon.reading import files, tables
from leansurgeon.reading.files import in_home
from leansurgeon.tasks import hub

if TYPE_CHECKING:
    from datasets import Dataset

SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")
)
TRAIN = ("train", "training")
EVAL = ("val", "validation", "valid", "eval", "dev", "development")
TEST = ("test", "testing")
_FILE_COLUMNS = ("filename", "file", "filepath", "path", "image", "imageid", "imagename", "imagepath", "img", "id")


@dataclass(frozen=True)
class ImagePlaces:
    """What a recipe's `data` refers to.

    `places[split]` are folders of classes, shards, parquet files or one loaded hub data set.
    """

    kind: str  # "folder", "flat", "listed" (a table that names files), "tar", "parquet" or "hub"
    places: dict[str, list[Any]]

    def key(self) -> dict[str, Any]:
        """Return a cache key of the content: names, sizes and times, because hashing 140 GB takes too long."""
        return {
            "kind": self.kind,
            "places": {split: [stamp(p) for p in places] for split, places in self.places.items()},
        }

    def file_stamps(self) -> str:
        """Return a digest of name, size and time of every file in the folders, to detect changes."""
        sha256 = hashlib.sha256()
        for place in (place for split in self.places.values() for place in split if isinstance(place, Path)):
            for root, folders, names in os.walk(place, followlinks=False):
                folders.sort()
                for name in sorted(names):
                    if not os.path.isfile(os.path.join(root, name)):
                        continue  # a broken link, or a file removed meanwhile
                    stat = os.stat(os.path.join(root, name))
                    sha256.update(f"{root}/{name} {stat.st_size} {stat.st_mtime_ns}\n".encode(errors="replace"))
        return sha256.hexdigest()


def part_of(name: str) -> str | None:
    """Return the split that the name of a file or folder says: "train", "eval" or "test"; None if it says none."""
    words = re.split(r"[^a-z]+", name.lower())
    parts = {"train": TRAIN, "eval": EVAL, "test": TEST}
    return next((part for part, known in parts.items() if any(word in words for word in known)), None)


def parts_by_name(files: Sequence[Path], root: Path | None = None, *, mixed: bool = False) -> dict[str, list[Path]]:
    """Return files by the split that their names say, or those of the folders between them and `root`.

    Empty unless all of them say one. With `mixed`, files that say none are "train" if no other is, and omitted
    otherwise.
    """
    parts = {}
    for path in files:
        words = [path.stem, *(reversed(path.relative_to(root).parts[:-1]) if root else ())]
        parts.setdefault(next((part for word in words if (part := part_of(word))), None), []).append(path)
    unnamed = parts.pop(None, [])
    if unnamed and (not mixed or not parts):
        return {}
    return parts if "train" in parts or not unnamed else {"train": unnamed, **parts}


def tables_of_images(place: Path) -> dict[str, list[Path]]:
    """Return, by split, the tables that list image files and their labels.

    They are `place` itself, those in the folder `place` (in class folders only metadata.csv and the like), or in its
    folders for the splits. Empty if there are none.
    """
    if not place.is_dir():
        return {"train": [place]} if image_column(place) else {}
    below = list(map(Path, listing(str(place)).folders))
    in_parts = [table for folder in below if part_of(folder.name) for table in sorted(folder.glob("metadata.*"))]
    in_classes = len([folder for folder in below if not part_of(folder.name) and listing(str(folder)).images]) > 1
    found = [table for table in sorted(place.iterdir()) if table.stem == "metadata" or not in_classes]
    found = [table for table in found or in_parts if image_column(table)] or [t for t in in_parts if image_column(t)]
    parts = parts_by_name(found, place, mixed=True) or {"train": found}
    if not found or "train" not in parts:
        return {}
    known = set(tables.columns(parts["train"][0]))  # skips a test table without the labels
    return {part: named[:1] for part, named in parts.items() if known <= set(tables.columns(named[0]))}


def image_column(table: Path) -> str | None:
    """Return the column of a table that names images; None if there is none, or no other column."""
    if not tables.is_table(table) or table.suffix.lower() == ".parquet":
        return None
    by_name = None
    try:
        unique = list(tables.columns(table))
        if len(unique) < 2:
            return None
        rows = [cells for _, cells in islice(tables.read(table, unique), 20)]
    except UsageError:  # reading the table will report it
        return None
    for column, cells in zip(unique, zip(*rows, strict=True), strict=False):
        values = list(map(str, cells))
        called = re.sub(r"[\W_]+", "", column.lower()) in _FILE_COLUMNS
        if values and (called or all(Path(value).suffix.lower() in SUFFIXES for value in values)):
            by_name = by_name or images_beside(table)
            if sum(image_of(value, table, by_name) is not None for value in values) > len(values) / 2:
                return column
    return None


def images_beside(table: Path) -> dict[str, str]:
    """Return the images in a table's folder and its subfolders, by name and by name without suffix.

    Among images of the same name, those in the folder of the split that the table is named after win.
    """
    here, part = listing(str(table.parent)), part_of(table.stem)
    folders = sorted(here.folders, key=lambda folder: part is not None and part_of(os.path.basename(folder)) == part)
    images = [*here.images, *(image for folder in folders for image in listing(folder).images)]
    return {key: path for path in images for key in (os.path.basename(path), Path(path).stem)}


def image_of(value: str, table: Path, by_name: dict[str, str]) -> str | None:
    """Return the image that a cell names, a path relative to the table or one of `images_beside`; None without one."""
    path = table.parent / value
    if path.suffix.lower() in SUFFIXES and path.is_file():
        return str(path)
    return by_name.get(os.path.basename(value))


def find(data: str, eval_data: str | None) -> ImagePlaces:
    """Return the folders, shards, parquet files or hub data set that `data` (and `eval_data`) name.

    One folder of classes without a split is "train" only, and the caller holds some out. Raises UsageError if there are
    no images, or none to evaluate on.
    """
    if named := hub.parse(data):
        by_hand = "Download its parquet files on another machine and name their folder with the task's option `data`."
        places = {"train": [hub.load(*named, "train", by_hand=by_hand)]}
        for split in ("validation", "test"):
            with suppress(LeanSurgeonError):
                places["eval"] = [hub.load(*named, split, by_hand=by_hand)]
                break
        return ImagePlaces("hub", places)
    train = _expand(data)
    if eval_data is None and len(train) == 1 and (listed := tables_of_images(train[0])):
        return ImagePlaces("listed", listed)
    if eval_data is not None:
        other = _expand(eval_data)
        kind, places = _kind_of(train, data), {"train": train, "eval": other}
        if _kind_of(other, eval_data) != kind:
            raise UsageError(f"'{data}' and '{eval_data}' hold images in different layouts.", "Give one kind.")
        return ImagePlaces(kind, places)
    root = train[0]
    if len(train) == 1 and root.is_dir():
        parts = parts_by_name(list(map(Path, listing(str(root)).folders)))
        if parts and "train" not in parts:
            raise UsageError(f"{root} has {next(iter(parts.values()))[0].name} and no folder train beside it.")
        if parts and any(listing(str(parts["train"][0]))):
            return ImagePlaces(_kind_of(parts["train"][:1], data), {part: found[:1] for part, found in parts.items()})
        for suffix, kind in ((".tar", "tar"), (".parquet", "parquet")):
            files = sorted(root.rglob(f"*{suffix}"))
            if files:
                return ImagePlaces(kind, _by_name(files, root))
        return ImagePlaces(_kind_of([root], data), {"train": [root]})
    return ImagePlaces(_kind_of(train, data), _by_name(train, None))


def _expand(text: str) -> list[Path]:
    path = in_home(text)
    paths = [path] if os.path.exists(path) else sorted(map(Path, glob.glob(str(path), recursive=True)))
    if not paths:
        hint = (
            "Give a folder with train/CLASS/*.jpg and val/CLASS/*.jpg, webdataset shards (*.tar), parquet files of the "
            "hub, or hub:OWNER/NAME."
        )
        raise UsageError(f"No images are at '{text}'.", hint)
    return [p.absolute() for p in paths]


def _kind_of(paths: list[Path], said: str) -> str:
    suffixes = {path.suffix for path in paths if path.is_file()}
    if suffixes in ({".tar"}, {".parquet"}):
        return suffixes.pop().removeprefix(".")
    if suffixes or len(paths) != 1:
        raise UsageError(f"'{said}' is neither a folder nor .tar shards nor .parquet files.")
    return "folder" if listing(str(paths[0])).folders else "flat"


def _by_name(files: list[Path], root: Path | None) -> dict[str, list[Path]]:
    """Return shards or parquet files by the split in their name, or in the folders between them and `root`."""
    parts = parts_by_name(files, root, mixed=True) or {"train": files}
    if "train" not in parts:
        raise UsageError(f"{files[0].parent} has {files[0].name} and no training files ('train' in the name).")
    return parts


def stamp(place: Path | Dataset) -> list[Any]:
    """Return a cache key of a file, folder or hub data set without reading it all: sizes and times, or a digest."""
    if not isinstance(place, Path):
        return [hub.digest(place)]
    stat = place.stat()
    if place.is_file():
        return [str(place), stat.st_size, stat.st_mtime_ns]
    # A folder's time changes when a file is added or removed in it, not below it; file content is read each time
    # anyway.
    return [str(place), stat.st_mtime_ns, _times_below(place)]


def _times_below(folder: Path | str) -> list[tuple[str, int]]:
    """Return (path, change time in ns) of every folder below this one, sorted, as `_images_in` visits them."""
    inner = [(path, os.stat(path).st_mtime_ns) for path in listing(str(folder)).folders if os.path.isdir(path)]
    return [row for path, time_ns in inner for row in ((path, time_ns), *_times_below(path))]


class Listing(NamedTuple):
    """The content of a folder, each list sorted by path."""

    folders: list[str]
    images: list[str]


def listing(folder: str) -> Listing:
    """Return folders and images in a folder, following links; hidden and other files are skipped.

    Raises UsageError for a link back to a folder above it, which would never end, and for an unreadable folder.
    """
    folders, images = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda e: e.name):
                if entry.name.startswith((".", "__MACOSX")):
                    continue
                if entry.is_dir():
                    if entry.is_symlink() and Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(entry)):
                        raise UsageError(f"The link {entry.path} points back to a folder that contains it.")
                    folders.append(entry.path)
                elif os.path.splitext(entry.name)[1].lower() in SUFFIXES and entry.is_file():
                    images.append(entry.path)
    except OSError as error:
        raise UsageError(f"The folder {error.filename or folder} cannot be read: {files.why(error)}.") from None
    return Listing(folders, images)
