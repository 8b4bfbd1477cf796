"""The images of a data set, wherever they are stored (`places.py`), as one index in the cache.

A sample of the index is (file, first byte, bytes, class). Images in folders and shards stay where they are and are
decoded when a batch needs them. Parquet files hold images in compressed pages of many, so a random access would read
hundreds; their images are copied once, undecoded, into one file of the cache.

Shape letters: N samples of a split, F files.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from leansurgeon.errors import UsageError, plural, quote
from leansurgeon.progress import Say, track
from leansurgeon.reading import archives, files, images, jsonfile, tables
from leansurgeon.reading.tables import class_names, parquet_parts, parquet_schema
from leansurgeon.tasks import base, disk_cache, splits, user_data
from leansurgeon.tasks.classes import sort_names
from leansurgeon.tasks.images.places import SUFFIXES, ImagePlaces, image_column, image_of, images_beside, listing

_WHOLE = UNLABELLED = -1
UNREAD = (".avif", ".heic", ".heif", ".jxl", ".jp2", ".svg", ".cr2", ".nef", ".dng")  # formats that are not read
CLASSES = 10_000_000  # upper bound of a class number
LABEL_COLUMNS = ("label", "labels", "fine_label", "cls", "class", "category")
_LABEL = 1_000_000  # bytes of a sample's class


def build(place: ImagePlaces, folder: Path, label: str | None, classes: int | None, say: Say) -> disk_cache.Info:
    """Write the index of every split into `folder`; return sizes, class names (or None) and the number of classes."""
    sizes, names, many, own, unread = {}, None, 0, None, Counter()
    for split, places in place.places.items():
        root, target = str(places[0]), folder / f"{split}-images.bin"
        if place.kind == "tar":
            paths, shards = [*map(str, places)], track(list(enumerate(places)), "images: shards", "shards/s")
            samples = [(number, *sample) for number, path in shards for sample in _samples_of(path)]
        elif place.kind in ("parquet", "hub"):
            own, rows = rows_of(place.kind, places, label)
            names = names or own
            paths, samples = [target.name], []
            with target.open("wb") as file:  # images without a class are not copied
                for content, name in rows:
                    samples.append((0, file.tell(), len(content), name))
                    if name not in (None, UNLABELLED):
                        file.write(content)
        else:
            if place.kind == "folder":  # each folder with images is a class, at any depth
                folders = listing(root).folders
                named = [(image, os.path.basename(path)) for path in folders for image in _images_in(path)]
            elif place.kind == "flat":  # no classes: enough for calibration, nothing to score
                named = [(image, base.IGNORED) for image in _images_in(root)]
            else:
                named = list_images(places[0], label, say)
            if place.kind != "listed":
                below = (name for _, _, found in os.walk(root) for name in found)
                unread.update(suffix for name in below if (suffix := os.path.splitext(name)[1].lower()) in UNREAD)
            paths = [path for path, _ in named]
            samples = [(number, 0, _WHOLE, name) for number, (_, name) in enumerate(named)]
        labelled = [sample for sample in samples if sample[-1] not in (None, UNLABELLED)]
        if left_out := len(samples) - len(labelled):
            say(f"images: {left_out:,} of {len(samples):,} rows have no label and are left out")
        if not labelled:
            if beside := listing(root).images if place.kind == "folder" else []:
                raise UsageError(
                    f"{root} holds {plural(len(beside), 'image')} beside each other, and no folders of classes.",
                    f"Sort them into folders named as those in {place.places['train'][0]} (ImageNet's valprep.sh does "
                    "so), or name others to evaluate on: task.eval_data.",
                )
            raise UsageError(f"{_name_of(places)} holds no images ({', '.join(sorted(SUFFIXES))}).")
        numbers, starts, lengths, labels = zip(*labelled, strict=True)
        if any(isinstance(name, str) for name in labels):
            labels = [str(name) for name in labels]  # shards may write 3 and "3" for one class
            names = sort_names({*labels}) if names is None else names
            if strange := sorted({*labels} - {*names}):
                where = _name_of(places)
                raise UsageError(f"{where} has the class '{strange[0]}', which the training images do not have.")
            order = {name: number for number, name in enumerate(names)}
            labels = [order[name] for name in labels]
        arrays = {
            "file": np.array(numbers, dtype=np.int32),
            "start": np.array(starts, dtype=np.int64),
            "size": np.array(lengths, dtype=np.int64),
            "labels": np.array(labels, dtype=np.int32),
            "files": np.array([os.fsencode(path) for path in paths]),
        }
        for name, array in arrays.items():
            np.save(folder / f"{split}-{name}.npy", array)
        sizes[split], many = len(labels), max(many, max(labels) + 1)
    if unread:
        told = ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(unread.items()))
        say(f"Left out, since such images are not read here: {told}. Save them as PNG or JPEG.")
    many = max(many, len(names or []))
    if many == 1:
        raise UsageError(
            f"{_name_of(place.places['train'])} holds images of one class{', ' + names[0] if names else ''}, and "
            "a classifier needs two or more.",
            "Images without classes, for calibration, lie in one folder without folders in it.",
        )
    if classes is not None and classes < many:
        raise UsageError(f"The data has {many:,} classes, more than the task's option classes {classes:,}.")
    return {"sizes": sizes, "labels": names, "classes": classes or many, "ordered": own is not None}


def split(folder: Path, info: disk_cache.Info, workers: int, *, skip_damaged: bool = False) -> disk_cache.Info:
    """Split the images of the index in `folder` by content, and write the rows of each side; return the entry's info.

    Every image is decoded once. Raises UsageError for images that cannot be decoded, unless `skip_damaged` omits them.
    """
    index = {path.stem: np.load(path) for path in folder.glob("*.npy")}
    stored = [side for side in splits.SIDES if side in info["sizes"]]
    ids = []
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for side in stored:
            reader, size = Reader(folder, side, index.__getitem__), info["sizes"][side]
            for start in track(range(0, size, 256), "images: checking each", "x 256 images/s"):
                ids += pool.map(partial(_content_of, reader), range(start, min(start + 256, size)))
    labels = np.concatenate([index[f"{side}-labels"] for side in stored])
    counts = [info["sizes"][side] for side in stored]
    damaged = [one.message for one in ids if isinstance(one, UsageError)]
    if damaged and not skip_damaged:
        others = f" So it is with {len(damaged) - 1:,} more." if len(damaged) > 1 else ""
        raise UsageError(damaged[0] + others, "Repair or remove the damaged files, or skip them: --skip-damaged.")
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
        | base.describe_split(
            found, "images", [names[i] for i in labels[kept]] if names and labels.min() >= 0 else None
        )
        | {"damaged": damaged}
    )


def _content_of(reader: Reader, row: int) -> int | UsageError:
    try:
        return splits.hash_image(reader.decode(row, "RGB"))
    except UsageError as error:
        return error


class Reader:
    """Reads samples through the arrays that `build` wrote."""

    def __init__(self, folder: Path, split: str, array: Callable[[str], np.ndarray]) -> None:
        self._folder = folder
        self._parts = [array(f"{split}-{name}") for name in ("file", "start", "size", "files")]

    def name(self, index: int) -> str:
        """Return the file of a sample, with its offset if the file holds several."""
        _, start, size, *_ = self._parts
        path = self._path(index)
        return path if size[index] == _WHOLE else f"{path} (byte {int(start[index]):,})"

    def read(self, index: int) -> bytes:
        """Return the encoded bytes of image `index`. Raises `OSError` if the file has become shorter."""
        start, size = (int(part[index]) for part in self._parts[1:3])
        path = self._path(index)
        if size == _WHOLE:
            return files.read_bytes(Path(path), images.LIMIT)
        with open(path, "rb") as file:
            content = os.pread(file.fileno(), size, start)
        if len(content) != size:
            raise OSError(f"{len(content):,} bytes where {size:,} are expected")
        return content

    def decode(self, index: int, mode: str) -> Any:
        """Return image `index` decoded by PIL as "RGB" or "L". Raises `UsageError` if it cannot be read."""
        where = f"The image {self.name(index)}"
        try:
            content = self.read(index)
        except OSError as error:
            raise UsageError(f"{where} cannot be read: {files.why(error)}.") from None
        return images.decode(content, mode, where)

    def _path(self, index: int) -> str:
        path = os.fsdecode(self._parts[3][self._parts[0][index]])
        return path if os.path.isabs(path) else str(self._folder / path)


def _name_of(places: list[Any]) -> str:
    return str(places[0]) if isinstance(places[0], Path) else "The hub data set"


def _images_in(folder: str) -> Iterator[str]:
    """Yield all images below a folder, sorted."""
    entries = listing(folder)
    yield from entries.images
    for path in entries.folders:
        yield from _images_in(path)


def _samples_of(path: Path) -> Iterator[tuple[int, int, Any]]:
    """Yield (first byte, bytes, class) of the samples of a webdataset shard.

    Members of a sample share the name up to its first dot; its class is in NAME.cls or NAME.json. Raises UsageError for
    a sample without an image or a class.
    """

    def name_of(member: tuple[str, int, int, Any]) -> tuple[str, str]:
        folder, _, name = member[0].rpartition("/")
        return folder, name.partition(".")[0]

    for key, members in groupby(archives.places(path), name_of):
        image = label = None
        for whole, start, size, read in members:
            suffix = whole.rpartition("/")[2].partition(".")[2]
            if f".{suffix.lower()}" in SUFFIXES:
                image = (start, size)
            elif suffix in ("cls", "json") and label is None:
                label = _class(read(_LABEL), suffix, f"{path}: {whole}")
        if image is None and label is None:
            continue
        if image is None or label is None:
            lacks = "image" if image is None else "class (.cls or .json)"
            raise UsageError(
                f"{path}: the sample '{'/'.join(filter(None, key))}' has no {lacks}.",
                f"Where {path.name} holds the images of the class {path.stem}, as ImageNet's do, unpack each archive "
                f"into a folder of its name: cd {path.parent} && for f in *.tar; do mkdir ${{f%.tar}} && tar -xf $f -C "
                "${f%.tar}; done"
                if label is None
                else None,
            )
        yield *image, label


def _class(content: bytes, suffix: str, where: str) -> int | str:
    """Return a class number or name from JSON, or from the bare words of a .cls file; UNLABELLED if there is none."""
    if suffix == "cls" and not content.strip():
        return UNLABELLED
    try:
        value = jsonfile.parse(content, where)
    except UsageError:
        value = content.decode(errors="replace").strip()
        if suffix == "json" or not value or len(value.splitlines()) > 1 or not value.isprintable():
            raise
    if suffix == "json" and isinstance(value, dict):
        said = [value[name] for name in LABEL_COLUMNS if name in value]
        value = UNLABELLED if said and said[0] is None else next(iter(said), None)
    if (isinstance(value, int) and UNLABELLED <= value < CLASSES) or (isinstance(value, str) and value.strip()):
        return value
    raise UsageError(f"{where} holds no class.")


# -- rows of tables, of parquet files and of the hub -----------------------------------------------


def rows_of(
    kind: str, places: list[Any], label: str | None
) -> tuple[list[str] | None, Iterator[tuple[bytes, int | str | None]]]:
    """Return class names (or None), and the encoded image and class of every row of parquet files or a hub data set."""
    first = places[0]
    where, present = ("The data set", first.column_names) if kind == "hub" else (first, parquet_schema(first).names)
    image = _find_column(user_data.IMAGE_COLUMNS, "image", present, where)
    label = _find_column((label,) if label else LABEL_COLUMNS, label or "label", present, where)
    if kind == "hub":
        import datasets

        names = getattr(first.features[label], "names", None)
        raw = first.select_columns([image, label]).cast_column(image, datasets.Image(decode=False))
        parts = ((where, part) for part in raw.iter(batch_size=64))
    else:
        names = class_names(first, label)
        for path in places[1:]:  # before any of them is copied
            for column in (image, label):
                _find_column((column,), column, parquet_schema(path).names, path)
        parts = ((path, part.to_pydict()) for path in places for part in parquet_parts(path, [image, label], 64))

    def pairs() -> Iterator[tuple[bytes, int | str | None]]:
        for where, part in parts:
            for content, said in zip(part[image], part[label], strict=True):
                content = content.get("bytes") if isinstance(content, dict) else content
                if not isinstance(content, bytes):
                    raise UsageError(
                        f"{where}: an image without its bytes (a struct of 'bytes' and 'path' is expected)."
                    )
                said = int(said) if isinstance(said, bool) or (isinstance(said, float) and said.is_integer()) else said
                if not (said is None or isinstance(said, str) or (isinstance(said, int) and -1 <= said < CLASSES)):
                    raise UsageError(f"{where}: the label {quote(said)} is no class.")
                yield content, said

    return names, pairs()


def _find_column(known: Sequence[str], said: str, present: Sequence[str], where: str | Path) -> str:
    column = next((name for name in known if name in present), None)
    if column is None:
        raise UsageError(f"{where} has no column '{said}'.", f"Columns: {', '.join(present)}.")
    return column


def list_images(table: Path, label: str | None, say: Say) -> list[tuple[str, int | str]]:
    """Return files and classes of the images that a table lists; without a label column the class is IGNORED.

    Rows whose image is missing, or that have no label, are omitted and counted in one line. Raises UsageError for
    labels that are no classes.
    """
    image, columns = image_column(table) or "", tables.columns(table)
    data = user_data.UserData("table", str(table), (str(table),), columns)
    found = (label,) if label else user_data.labels_among(data, [column for column in columns if column != image])
    by_name = images_beside(table)
    read = tables.read(table, [image, *found])
    rows = [(image_of(str(cells[0]), table, by_name), cells[1:]) for _, cells in read]
    if not found:
        return [(file, base.IGNORED) for file, _ in rows if file]
    labels = user_data.labels_in([cells for _, cells in rows], found)
    if labels.kind != "class":
        raise UsageError(f"{table}: '{', '.join(found)}' holds no classes of images, one of each.")
    whole = [(file, name) for (file, _), name in zip(rows, labels.values, strict=True) if file and name is not None]
    if len(whole) < len(rows):
        gone = sum(file is None for file, _ in rows)
        say(
            f"{table.name}: {gone:,} rows name no image that is there, {len(rows) - len(whole) - gone:,} have no label."
        )
    return whole
