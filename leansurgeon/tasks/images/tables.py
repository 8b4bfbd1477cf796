"""Encoded images and their classes from parquet files as the hub has them, or from a loaded data set of the hub."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leansurgeon.errors import UsageError, quoted
from leansurgeon.reading import tables
from leansurgeon.reading.tables import class_names, parquet_parts, parquet_schema
from leansurgeon.tasks import base, user_data
from leansurgeon.tasks.images import places

if TYPE_CHECKING:
    from datasets import Dataset

CLASSES = 10_000_000  # that a class number may count to
LABEL_COLUMNS = ("label", "labels", "fine_label", "cls", "class", "category")


def rows_of(
    kind: str, places: list[Any], label: str | None
) -> tuple[list[str] | None, Iterator[tuple[bytes, int | str | None]]]:
    """Class names (or None), and the encoded image and class of every row of parquet files or of a hub data set."""
    return _hub_rows(places[0], label) if kind == "hub" else _parquet_rows(places, label)


def _parquet_rows(
    paths: list[Path], label: str | None
) -> tuple[list[str] | None, Iterator[tuple[bytes, int | str | None]]]:
    schema = parquet_schema(paths[0])
    image, label = _columns(schema.names, label, str(paths[0]))
    names = class_names(paths[0], label)
    for path in paths[1:]:  # before any of them is copied
        present = parquet_schema(path).names
        for column in (image, label):
            if column not in present:
                raise UsageError(f"{path} has no column '{column}'.", f"Columns: {', '.join(present)}.")

    def rows() -> Iterator[tuple[bytes, int | str | None]]:
        for path in paths:
            for part in parquet_parts(path, [image, label], 64):
                yield from _pairs(part.column(image).to_pylist(), part.column(label).to_pylist(), str(path))

    return names, rows()


def _hub_rows(dataset: Dataset, label: str | None) -> tuple[list[str] | None, Iterator[tuple[bytes, int | str | None]]]:
    import datasets

    image, label = _columns(dataset.column_names, label, "The data set")
    names = getattr(dataset.features[label], "names", None)
    raw = dataset.select_columns([image, label]).cast_column(image, datasets.Image(decode=False))
    parts = raw.iter(batch_size=64)
    return names, (pair for part in parts for pair in _pairs(part[image], part[label], "The data set"))


def _pairs(images: list[Any], labels: list[Any], where: str) -> Iterable[tuple[bytes, int | str | None]]:
    for image, label in zip(images, labels, strict=True):
        content = image.get("bytes") if isinstance(image, dict) else image
        if not isinstance(content, bytes):
            raise UsageError(f"{where}: an image without its bytes (a struct of 'bytes' and 'path' is expected).")
        label = int(label) if isinstance(label, bool) or (isinstance(label, float) and label.is_integer()) else label
        if not (label is None or isinstance(label, str) or (isinstance(label, int) and -1 <= label < CLASSES)):
            raise UsageError(f"{where}: the label {quoted(label)} is no class.")
        yield content, label


def _columns(present: list[str], label: str | None, where: str) -> tuple[str, str]:
    wanted = [(user_data.IMAGE_COLUMNS, "image"), ((label,) if label else LABEL_COLUMNS, label or "label")]
    columns = [next((name for name in names if name in present), None) for names, _ in wanted]
    for column, (_, said) in zip(columns, wanted, strict=True):
        if column is None:
            raise UsageError(f"{where} has no column '{said}'.", f"Columns: {', '.join(present)}.")
    return columns[0], columns[1]


def listed(table: Path, label: str | None, say: Callable[[str], None]) -> list[tuple[str, int | str]]:
    """Files and classes of the images that a table names; without a column of labels their class is IGNORED. Rows whose
    image is not there, or that have no label, are left out, and counted in one line. Raises UsageError for labels that
    are no classes.
    """
    image, columns = places.image_column(table) or "", tables.columns(table)
    data = user_data.UserData("table", str(table), (str(table),), columns)
    found = (label,) if label else user_data.labels_among(data, [column for column in columns if column != image])
    by_name = places.images_beside(table)
    read = tables.read(table, [image, *found])
    rows = [(places.image_of(str(cells[0]), table, by_name), cells[1:]) for _, cells in read]
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
