"""The images of a data set, wherever they lie (`places.py`), as one index in the cache.

A sample of the index is (file, first byte, bytes, class); images in folders and shards stay where they are and are
decoded when a batch asks for them. Images in parquet files lie in compressed pages that hold many, so that reading one
at random would read hundreds; they are copied once, undecoded, into one file of the cache.

Shape letters: N samples of a split, F files.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from leansurgeon.errors import LeanSurgeonError, UsageError, plural
from leansurgeon.progress import size_text, track
from leansurgeon.reading import archives, files, images, jsonfile
from leansurgeon.tasks import base, ragged, splits
from leansurgeon.tasks.classes import sort_names
from leansurgeon.tasks.images import tables as image_tables
from leansurgeon.tasks.images.places import SUFFIXES, ImagePlaces, listing

_WHOLE = UNLABELLED = -1
UNREAD = (".avif", ".heic", ".heif", ".jxl", ".jp2", ".svg", ".cr2", ".nef", ".dng")  # images all the same
_LABEL = 1_000_000  # bytes of a sample's class


@dataclass
class Index:
    """The samples of one split while they are collected."""

    files: list[str] = field(default_factory=list)
    file: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    label: list[Any] = field(default_factory=list)
    unlabelled: int = 0  # samples that were left out

    def add(self, file: int, start: int, size: int, label: int | str | None) -> bool:
        """One image more: `size` bytes from `start` in file number `file`, of class `label`; whether it has one."""
        if label is None or label == UNLABELLED:
            self.unlabelled += 1
            return False
        self.file.append(file)
        self.start.append(start)
        self.size.append(size)
        self.label.append(label)
        return True

    def add_file(self, path: str, label: int | str) -> None:
        """An image in a file of its own."""
        self.add(len(self.files), 0, _WHOLE, label)
        self.files.append(path)

    def number_labels(self, names: list[str] | None, where: str) -> list[str] | None:
        """Make labels that are names places in `names`, those of the training images, or of these (None). Raises
        UsageError for others.
        """
        present = {label for label in self.label if isinstance(label, str)}
        if not present:
            return names
        names = sort_names(present) if names is None else names
        if strange := sorted({*map(str, self.label)} - {*names}):
            raise UsageError(f"{where} has the class '{strange[0]}', which the training images do not have.")
        places = {name: place for place, name in enumerate(names)}
        self.label = [places[label] for label in self.label]
        return names


def build(
    place: ImagePlaces, folder: Path, label: str | None, classes: int | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """Write the index of every split into `folder`; returns sizes, class names (or None) and the number of classes."""
    sizes, names, many, own = {}, None, 0, None
    for split, places in place.places.items():
        index = Index()
        if place.kind == "folder":  # a class for every folder in which there are images, however deep
            for path in listing(str(places[0])).folders:
                for image in _images_in(path):
                    index.add_file(image, os.path.basename(path))
        elif place.kind == "flat":  # images without classes: enough to calibrate with, nothing to score
            for image in _images_in(str(places[0])):
                index.add_file(image, base.IGNORED)
        elif place.kind == "listed":
            for path, name in image_tables.listed(places[0], label, say):
                index.add_file(path, name)
        elif place.kind == "tar":
            index = _shards(places)
        else:
            index, own = _unpack(place.kind, places, folder / f"{split}-images.bin", label, say)
            names = names or own
        if index.unlabelled:
            total = index.unlabelled + len(index.file)
            say(f"images: {index.unlabelled:,} of {total:,} rows have no label and are left out")
        if not index.file:
            if beside := listing(str(places[0])).images if place.kind == "folder" else []:
                raise UsageError(
                    f"{places[0]} holds {plural(len(beside), 'image')} beside each other, and no folders of classes.",
                    f"Sort them into folders named as those in {place.places['train'][0]} (ImageNet's valprep.sh does "
                    "so), or name others to evaluate on: task.eval_data.",
                )
            raise UsageError(f"{_called(places)} holds no images ({', '.join(sorted(SUFFIXES))}).")
        names = index.number_labels(names, _called(places))
        _write(folder, split, index)
        sizes[split], many = len(index.file), max(many, max(index.label) + 1)
    others = Counter(
        suffix
        for places in (place.places.values() if place.kind in ("folder", "flat") else ())
        for root in places
        for _, _, found in os.walk(root)
        for name in found
        if (suffix := os.path.splitext(name)[1].lower()) in UNREAD
    )
    if others:
        told = ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(others.items()))
        say(f"Left out, since such images are not read here: {told}. Save them as PNG or JPEG.")
    many = max(many, len(names or []))
    if many == 1:
        raise UsageError(
            f"{_called(place.places['train'])} holds images of one class{', ' + names[0] if names else ''}, and "
            "telling classes apart takes two or more.",
            "Images without classes, for calibration, lie in one folder without folders in it.",
        )
    if classes is not None and classes < many:
        raise UsageError(f"The data has {many:,} classes, more than the task's option classes {classes:,}.")
    return {"sizes": sizes, "labels": names, "classes": classes or many, "ordered": own is not None}


def split(folder: Path, info: dict[str, Any], workers: int, *, skip_damaged: bool = False) -> dict[str, Any]:
    """Part the images of the index in `folder` by what they show, and write which rows stand on which side; what the
    entry keeps of it. Every image is decoded once. Raises UsageError for those that cannot be, unless they are left
    out.
    """
    index = {name: np.load(path) for path in folder.glob("*.npy") if (name := path.stem)}
    stored = [side for side in splits.SIDES if side in info["sizes"]]
    ids: list[int | UsageError] = []
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for side in stored:
            reader, size = Reader(folder, side, index.__getitem__), info["sizes"][side]
            for start in track(range(0, size, 256), "images: looking at each", "x 256 images/s"):
                ids += pool.map(partial(_content_of, reader), range(start, min(start + 256, size)))
    labels = np.concatenate([index[f"{side}-labels"] for side in stored])
    counts = [info["sizes"][side] for side in stored]
    damaged = [one.message for one in ids if isinstance(one, UsageError)]
    if damaged and not skip_damaged:
        others = f" So it is with {len(damaged) - 1:,} more." if len(damaged) > 1 else ""
        raise UsageError(damaged[0] + others, "Mend or remove what is damaged, or leave it out: --skip-damaged.")
    kept = np.array([row for row, one in enumerate(ids) if not isinstance(one, UsageError)], dtype=np.int64)
    sides = np.repeat([splits.SIDES.index(side) for side in stored], counts)
    found = splits.split_by_content([ids[row] for row in kept], labels[kept], sides[kept])
    first = dict(zip(stored, np.cumsum([0, *counts]), strict=False))
    names = info["labels"]
    for side, rows in found.rows.items():
        np.save(folder / f"{side}-rows.npy", kept[rows] - first.get(side, 0))
    return (
        {
            "sizes": {side: len(rows) for side, rows in found.rows.items()},
            "stored": {side: side if side in stored else "train" for side in splits.SIDES},
        }
        | base.found(found, "images", [names[i] for i in labels[kept]] if names and labels.min() >= 0 else None)
        | {"damaged": damaged}
    )


def _content_of(reader: Reader, row: int) -> int | UsageError:
    where = f"The image {reader.name(row)}"
    try:
        return splits.hash_image(images.decode(reader.read(row), "RGB", where))
    except UsageError as error:
        return error
    except OSError as error:
        return UsageError(f"{where} cannot be read: {files.why(error)}.")


def readable_names(folder: Path, info: dict[str, Any]) -> set[str]:
    """The files of an entry's index, but those that were left out."""
    names: set[str] = set()
    for path in folder.glob("*-files.npy"):
        starts = np.load(path.with_name(path.name.replace("-files", "-file-starts")))
        flat = np.load(path).tobytes()
        names |= {os.fsdecode(flat[a:b]) for a, b in pairwise(starts)}
    said = " ".join(info.get("damaged", ()))
    return {name for name in names if name not in said}


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


def _called(places: list[Any]) -> str:
    return str(places[0]) if isinstance(places[0], Path) else "The hub data set"


def _images_in(folder: str) -> Iterator[str]:
    """All images below a folder, sorted."""
    entries = listing(folder)
    yield from entries.images
    for path in entries.folders:
        yield from _images_in(path)


def _shards(places: list[Path]) -> Index:
    """Samples of webdataset shards: members that share the name up to its first dot; class in NAME.cls or NAME.json."""
    index = Index(files=list(map(str, places)))
    for number, path in track(list(enumerate(places)), "images: shards", "shards/s"):
        _shard(number, path, index)
    return index


def _shard(number: int, path: Path, index: Index) -> None:
    key, image, label = None, None, None

    def close() -> None:
        if image is None and label is None:
            return
        if image is None or label is None:
            lacks = "image" if image is None else "class (.cls or .json)"
            whole = "/".join(filter(None, key))
            raise UsageError(
                f"{path}: the sample '{whole}' has no {lacks}.",
                f"Where {path.name} holds the images of the class {path.stem}, as ImageNet's do, unpack each archive "
                f"into a folder of its name: cd {path.parent} && for f in *.tar; do mkdir ${{f%.tar}} && tar -xf $f -C "
                "${f%.tar}; done"
                if label is None
                else None,
            )
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


def _class(content: bytes, suffix: str, where: str) -> int | str:
    """A class number, or a name: as JSON has it, or the bare words of a .cls file; UNLABELLED where it says none."""
    if suffix == "cls" and not content.strip():
        return UNLABELLED
    try:
        value = jsonfile.parse(content, where)
    except UsageError:
        value = content.decode(errors="replace").strip()
        if suffix == "json" or not value or len(value.splitlines()) > 1 or not value.isprintable():
            raise
    if suffix == "json" and isinstance(value, dict):
        said = [value[name] for name in image_tables.LABEL_COLUMNS if name in value]
        value = UNLABELLED if said and said[0] is None else next(iter(said), None)
    if (isinstance(value, int) and UNLABELLED <= value < image_tables.CLASSES) or (
        isinstance(value, str) and value.strip()
    ):
        return value
    raise UsageError(f"{where} holds no class.")


def _unpack(
    kind: str, places: list[Any], target: Path, label: str | None, say: Callable[[str], None]
) -> tuple[Index, list[str] | None]:
    """Copy the image bytes of parquet files, or of a hub data set, one after another into `target`."""
    names, rows = image_tables.rows_of(kind, places, label)
    _room_for(target.parent, sum(p.stat().st_size for p in places if isinstance(p, Path)), say)
    index, place = Index(files=[target.name]), 0
    with target.open("wb") as file:
        for content, value in rows:
            if index.add(0, place, len(content), value):
                file.write(content)
                place += len(content)
    return index, names


def _room_for(folder: Path, size: int, say: Callable[[str], None]) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:
        raise LeanSurgeonError(
            f"The images of the parquet files take {size_text(size)} in the data cache, and {size_text(free)} are "
            "free there.",
            "Free some, put the cache elsewhere, or give the images as webdataset shards, which stay where they are.",
        )
    if size > 1e9:
        say(f"images: copying {size_text(size)} out of parquet files into the cache, once")


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
