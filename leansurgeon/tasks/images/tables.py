"""Encoded images and their classes from parquet files as the hub has them, or from a loaded data set of the hub."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from leansurgeon.errors import UsageError

_IMAGE_COLUMNS, LABEL_COLUMNS = ("image", "img", "jpg"), ("label", "labels", "fine_label", "cls")


def rows_of(kind: str, places: list[Any], label: str | None) -> tuple[list[str] | None, Iterator[tuple[bytes, int]]]:
    """Class names (or None), and the encoded image and class of every row of parquet files or of a hub data set."""
    return _hub_rows(places[0], label) if kind == "hub" else _parquet_rows(places, label)


def _parquet_rows(paths: list[Path], label: str | None) -> tuple[list[str] | None, Iterator[tuple[bytes, int]]]:
    import pyarrow
    from pyarrow import parquet

    schema = _schema(paths[0])
    image, label = _columns(schema.names, label, str(paths[0]))
    features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    names = features.get(label, {}).get("names")
    for path in paths[1:]:
        _has_columns(path, (image, label))

    def rows() -> Iterator[tuple[bytes, int]]:
        for path in paths:
            try:
                for part in parquet.ParquetFile(path).iter_batches(64, columns=[image, label]):
                    yield from _pairs(part.column(image).to_pylist(), part.column(label).to_pylist(), str(path))
            except pyarrow.ArrowException as error:
                raise UsageError(f"{path} is not a readable parquet file: {str(error).splitlines()[0]}") from None

    return names, rows()


def _schema(path: Path) -> Any:
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.read_schema(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"{path} is not a readable parquet file: {str(error).splitlines()[0]}") from None


def _has_columns(path: Path, columns: tuple[str, ...]) -> None:
    """Raise UsageError where a further file of a set lacks a column of the first: before any of them is copied."""
    present = _schema(path).names
    for column in columns:
        if column not in present:
            raise UsageError(f"{path} has no column '{column}'.", f"Columns: {', '.join(present)}.")


def _hub_rows(dataset: Any, label: str | None) -> tuple[list[str] | None, Iterator[tuple[bytes, int]]]:
    import datasets

    image, label = _columns(dataset.column_names, label, "The data set")
    names = getattr(dataset.features[label], "names", None)
    raw = dataset.select_columns([image, label]).cast_column(image, datasets.Image(decode=False))
    parts = raw.iter(batch_size=64)
    return names, (pair for part in parts for pair in _pairs(part[image], part[label], "The data set"))


def _pairs(images: list[Any], labels: list[Any], where: str) -> Iterable[tuple[bytes, int]]:
    for image, label in zip(images, labels, strict=True):
        content = image.get("bytes") if isinstance(image, dict) else image
        if not isinstance(content, bytes):
            raise UsageError(f"{where}: an image without its bytes (a struct of 'bytes' and 'path' is expected).")
        if isinstance(label, bool) or not isinstance(label, int) or label < 0:
            raise UsageError(f"{where}: the label {label!r} is not a class number.")
        yield content, label


def _columns(present: list[str], label: str | None, where: str) -> tuple[str, str]:
    wanted = [(_IMAGE_COLUMNS, "image"), ((label,) if label else LABEL_COLUMNS, label or "label")]
    found = [next((name for name in names if name in present), None) for names, _ in wanted]
    for column, (_, said) in zip(found, wanted, strict=True):
        if column is None:
            raise UsageError(f"{where} has no column '{said}'.", f"Columns: {', '.join(present)}.")
    return found[0], found[1]
