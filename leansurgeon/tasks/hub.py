"""Data sets of the Hugging Face hub, and the error if one cannot be fetched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leansurgeon.errors import UsageError, did_you_mean
from leansurgeon.reading import tables

if TYPE_CHECKING:
    from datasets import Dataset

YOURS = "Use data of your own: leansurgeon retrain MODEL --data FOLDER; or the included novel: --data austen."


def parse(name: str) -> tuple[str, str | None] | None:
    """Parse `hub:owner/name` or `hub:owner/name/configuration` into (data set, configuration); None for any other text.

    Raises UsageError for a malformed hub name.
    """
    if not name.startswith("hub:"):
        return None
    parts = name.removeprefix("hub:").strip("/").split("/")
    if not all(parts) or len(parts) > 3:
        raise UsageError(
            f"'{name}' names no data set of the hub; write hub:owner/name or hub:owner/name/configuration."
        )
    return "/".join(parts[:2]), parts[2] if len(parts) == 3 else None


def load(name: str, config: str | None, split: str, *, by_hand: str) -> Any:
    """Load a `datasets.Dataset` (Arrow files in the hub's own cache, not in memory).

    Raises UsageError if it cannot be had, with its name, its address and `by_hand`, how to get it manually.
    """
    import datasets

    try:
        return datasets.load_dataset(name, config, split=split)
    except Exception as error:
        # The client has its own exception for each layer, and they change between versions.
        what = f"{name} ({config})" if config else name
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UsageError(
            f"The data set {what}, split {split}, cannot be fetched from huggingface.co/datasets/{name}: {reason}.",
            f"{by_hand} {YOURS}",
        ) from error


def digest(dataset: Dataset) -> str:
    """Return a digest of the content for a cache key."""
    return str(dataset._fingerprint)


def rows(dataset: Dataset, columns: list[str], name: str) -> Iterator[tuple[int, list[Any]]]:
    """Yield (row number from 1, values of `columns`) of every row, as `tables.read` does."""
    for column in columns:
        if column not in dataset.column_names:
            names = ", ".join(f"'{known}'" for known in dataset.column_names)
            near = did_you_mean(column, dataset.column_names)
            raise UsageError(f"The data set {name} has no column '{column}'{near}.", f"Columns: {names}.")
    number = 0
    for part in dataset.select_columns(columns).iter(batch_size=1000):
        for row in zip(*(part[column] for column in columns), strict=True):
            number += 1
            yield number, list(row)


def read(place: Path | Dataset, columns: list[str]) -> Iterator[tuple[str, list[Any]]]:
    """Yield (where it stands, values of `columns`) of every row of a table or of a data set of the hub."""
    if isinstance(place, Path):
        name, numbered = str(place), tables.read(place, columns)
    else:
        name, numbered = "The data set", rows(place, columns, str(place.info.dataset_name))
    for number, row in numbered:
        yield f"{name}, row {number}", row
