"""Where the images of a data set lie: class folders, webdataset shards or parquet files, as one index in the cache.

A sample of the index is (file, first byte, bytes, class); images in folders and shards stay where they are and are
decoded when a batch asks for them. Images in parquet files lie in compressed pages that hold many, so that reading one
at random would read hundreds; they are copied once, undecoded, into one file of the cache.

Shape letters: N samples of a split, F files.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from leansurgeon.errors import LeanSurgeonError, UsageError
from leansurgeon.reading import archives, files, images, jsonfile
from leansurgeon.tasks import base, hub, ragged
from leansurgeon.tasks.images import tables as image_tables

if TYPE_CHECKING:
    from datasets import Dataset

SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff"))
TRAIN = ("train", "training")
EVAL = ("val", "validation", "valid", "eval", "dev", "test")  # the first that is there
_WHOLE = -1
_LABEL = 1_000_000  # bytes of a sample's class


@dataclass(frozen=True)
class Found:
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


@dataclass
class Index:
    """The samples of one split while they are collected."""

    files: list[str] = field(default_factory=list)
    file: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    label: list[int] = field(default_factory=list)

    def add(self, file: int, start: int, size: int, label: int) -> None:
        """One image more: `size` bytes from `start` in file number `file`, of class `label`."""
        self.file.append(file)
        self.start.append(start)
        self.size.append(size)
        self.label.append(label)


def find(data: str, eval_data: str | None, *, hold_out: bool = True) -> Found:
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
        return Found(kind, places)
    root = train[0]
    if len(train) == 1 and root.is_dir():
        split = {os.path.basename(path).lower(): Path(path) for path in listing(str(root)).folders}
        folders = [next((split[n] for n in names if n in split), None) for names in (TRAIN, EVAL)]
        if all(folders) and _kind_of([folders[0]], data) in ("folder", "flat"):
            return Found(_kind_of([folders[0]], data), {"train": [folders[0]], "eval": [folders[1]]})
        for suffix, kind in ((".tar", "tar"), (".parquet", "parquet")):
            files = sorted(root.rglob(f"*{suffix}"))
            if files:
                return Found(kind, _by_name(files, root))
        if folders[0] is None and folders[1] is None:
            return Found(_kind_of([root], data), {"train": [root]})
        missing = "val" if folders[0] else "train"
        raise UsageError(f"{root} has {'train' if folders[0] else folders[1].name} and no folder {missing} beside it.")
    return Found(_kind_of(train, data), _by_name(train, Path()))


def build(
    found: Found, folder: Path, label: str | None, classes: int | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """Write the index of every split into `folder`; returns sizes, class names (or None) and the number of classes."""
    sizes, names, many = {}, None, 0
    for split, places in found.places.items():
        if found.kind == "folder":
            index, names = _folders(places, names)
        elif found.kind == "flat":
            index = _flat(places)
        elif found.kind == "tar":
            index = _shards(places, say)
        else:
            index, own = _unpack(found.kind, places, folder / f"{split}-images.bin", label, say)
            names = names or own
        if not index.file:
            raise UsageError(f"{_called(places)} holds no images ({', '.join(sorted(SUFFIXES))}).")
        _write(folder, split, index)
        sizes[split], many = len(index.file), max(many, max(index.label) + 1)
    many = max(many, len(names or []))
    if many == 1:
        raise UsageError(
            f"{_called(found.places['train'])} holds images of one class, and telling classes apart takes two or more.",
            "Images without classes, for calibration, lie in one folder without folders in it.",
        )
    if classes is not None and classes < many:
        raise UsageError(f"The data has {many:,} classes, more than the task's option classes {classes:,}.")
    return {"sizes": sizes, "labels": names, "classes": classes or many}


class Reader:
    """Bytes of a sample, from the arrays that `build` wrote. Files are kept open, a few of them."""

    def __init__(self, folder: Path, split: str, array: Callable[[str], np.ndarray]) -> None:
        self._folder = folder
        self._parts = [array(f"{split}-{name}") for name in ("file", "start", "size", "files", "file-starts")]
        self._open: dict[int, int] = {}

    def name(self, index: int) -> str:
        """The file of a sample, with the place in it if it holds several."""
        file, start, size, *_ = self._parts
        path = self._path(int(file[index]))
        return path if size[index] == _WHOLE else f"{path} (byte {int(start[index]):,})"

    def read(self, index: int) -> bytes:
        """The encoded bytes of image `index`. Raises `OSError` where the file is shorter than it was."""
        file, start, size, *_ = (part[index] for part in self._parts[:3])
        if size == _WHOLE:
            return files.read_bytes(Path(self._path(int(file))), images.LIMIT)
        content = os.pread(self._descriptor(int(file)), int(size), int(start))
        if len(content) != size:
            raise OSError(f"{len(content):,} bytes where {int(size):,} are expected")
        return content

    def _path(self, number: int) -> str:
        flat, starts = self._parts[3:]
        path = os.fsdecode(flat[starts[number] : starts[number + 1]].tobytes())
        return path if os.path.isabs(path) else str(self._folder / path)

    def _descriptor(self, number: int) -> int:
        if number not in self._open:
            while len(self._open) >= 64:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[number] = os.open(self._path(number), os.O_RDONLY)
        return self._open[number]

    def __del__(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)


# -- finding ---------------------------------------------------------------------------------------


def _expand(text: str) -> list[Path]:
    import glob

    path = Path(text).expanduser()
    found = [path] if os.path.exists(path) else sorted(map(Path, glob.glob(str(path), recursive=True)))
    if not found:
        hint = (
            "Give a folder with train/CLASS/*.jpg and val/CLASS/*.jpg, webdataset shards (*.tar), parquet files of the "
            "hub, or hub:OWNER/NAME."
        )
        raise UsageError(f"No images are at '{text}'.", hint)
    return [p.absolute() for p in found]


def _find_hub(data: str) -> Found:
    name, config = hub.parse(data)
    by_hand = "Download its parquet files on another machine and name their folder with the task's option `data`."
    train = hub.load(name, config, "train", by_hand=by_hand)
    for split in ("validation", "test"):
        try:
            return Found("hub", {"train": [train], "eval": [hub.load(name, config, split, by_hand=by_hand)]})
        except LeanSurgeonError:
            continue
    return Found("hub", {"train": [train]})


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


def _called(places: list[Any]) -> str:
    return str(places[0]) if isinstance(places[0], Path) else "The hub data set"


# -- reading what is there -------------------------------------------------------------------------


def _images_in(folder: str) -> Iterator[str]:
    """All images below a folder, sorted."""
    found = listing(folder)
    yield from found.images
    for path in found.folders:
        yield from _images_in(path)


def _folders(places: list[Path], names: list[str] | None) -> tuple[Index, list[str]]:
    (root,) = places
    present = [name for path in listing(str(root)).folders if (name := os.path.basename(path))[0] != "."]
    names = present if names is None else names
    strange = [name for name in present if name not in set(names)]
    if strange:
        raise UsageError(f"{root} has the class folder '{strange[0]}', which the training images do not have.")
    numbers = {name: number for number, name in enumerate(names)}
    index = Index()
    empty = []
    for name in present:
        before = len(index.files)
        for path in _images_in(os.path.join(root, name)):
            index.add(len(index.files), 0, _WHOLE, numbers[name])
            index.files.append(path)
        if len(index.files) == before:
            empty.append(name)
    if empty and index.files:
        listed = ", ".join(f"'{name}'" for name in empty[:5]) + (", ..." if len(empty) > 5 else "")
        raise UsageError(
            f"{root} has {len(empty):,} of {len(present):,} class folders without images: {listed}.",
            "Fill them or remove them.",
        )
    return index, names


def _flat(places: list[Path]) -> Index:
    """Images without classes: enough to calibrate with, nothing to score."""
    index = Index()
    for path in _images_in(str(places[0])):
        index.add(len(index.files), 0, _WHOLE, base.IGNORED)
        index.files.append(path)
    return index


def _shards(places: list[Path], say: Callable[[str], None]) -> Index:
    """Samples of webdataset shards: members that share the name up to its first dot; class in NAME.cls or NAME.json."""
    index, told = Index(files=list(map(str, places))), time.monotonic()
    for number, path in enumerate(places):
        _shard(number, path, index)
        if time.monotonic() - told > 5:
            told = time.monotonic()
            say(f"images: shard {number + 1:,} of {len(places):,}, {len(index.file):,} images")
    return index


def _shard(number: int, path: Path, index: Index) -> None:
    key, image, label = None, None, None

    def close() -> None:
        if image is None and label is None:
            return
        if image is None or label is None:
            lacks = "image" if image is None else "class (.cls or .json)"
            raise UsageError(f"{path}: the sample '{key}' has no {lacks}.")
        index.add(number, *image, label)

    for whole, start, size, read in archives.places(path):
        folder, _, name = whole.rpartition("/")
        stem, _, suffix = name.partition(".")
        if (folder, stem) != key:
            close()
            key, image, label = (folder, stem), None, None
        if f".{suffix.lower()}" in SUFFIXES:
            image = (start, size)
        elif suffix in ("cls", "json"):
            label = _class(read(_LABEL), suffix, f"{path}: {whole}") if label is None else label
    close()


def _class(content: bytes, suffix: str, where: str) -> int:
    value = jsonfile.parse(content, where)
    if suffix == "json" and isinstance(value, dict):
        value = next((value[name] for name in image_tables.LABEL_COLUMNS if name in value), None)
    if isinstance(value, int) and 0 <= value < image_tables.CLASSES:
        return value
    raise UsageError(f"{where} holds no class number.")


def _unpack(
    kind: str, places: list[Any], target: Path, label: str | None, say: Callable[[str], None]
) -> tuple[Index, list[str] | None]:
    """Copy the image bytes of parquet files, or of a hub data set, one after another into `target`."""
    names, rows = image_tables.rows_of(kind, places, label)
    _room_for(target.parent, sum(p.stat().st_size for p in places if isinstance(p, Path)), say)
    index, place = Index(files=[target.name]), 0
    with target.open("wb") as file:
        for content, number in rows:
            index.add(0, place, len(content), number)
            file.write(content)
            place += len(content)
    return index, names


def _room_for(folder: Path, size: int, say: Callable[[str], None]) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:
        raise LeanSurgeonError(
            f"The images of the parquet files take {size / 1e9:.1f} GB in the data cache, and {free / 1e9:.1f} GB are "
            "free there.",
            "Free some, put the cache elsewhere, or give the images as webdataset shards, which stay where they are.",
        )
    if size > 1e9:
        say(f"images: copying {size / 1e9:.1f} GB out of parquet files into the cache, once")


def _write(folder: Path, split: str, index: Index) -> None:
    encoded = [os.fsencode(name) for name in index.files]
    arrays = {
        "file": np.array(index.file, dtype=np.int32),
        "start": np.array(index.start, dtype=np.int64),
        "size": np.array(index.size, dtype=np.int64),
        "labels": np.array(index.label, dtype=np.int32),
        "files": np.frombuffer(b"".join(encoded), dtype=np.uint8),
        "file-starts": ragged.starts_of(np.array([len(name) for name in encoded], dtype=np.int64)),
    }
    for name, array in arrays.items():
        np.save(folder / f"{split}-{name}.npy", array)
