"""Data sets of the Hugging Face hub, and the one sentence that is said where one cannot be fetched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from leansurgeon.errors import LeanSurgeonError, UsageError, did_you_mean

_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")


def parse(name: str) -> tuple[str, str | None] | None:
    """`hub:owner/name` or `hub:owner/name/configuration` as (data set, configuration); None for any other text."""
    if not name.startswith("hub:"):
        return None
    parts = name.removeprefix("hub:").strip("/").split("/")
    if not all(parts) or len(parts) > 3:
        raise UsageError(
            f"'{name}' names no data set of the hub; write hub:owner/name or hub:owner/name/configuration."
        )
    return "/".join(parts[:2]), parts[2] if len(parts) == 3 else None


def load(name: str, config: str | None, split: str, *, by_hand: str) -> Any:
    """A `datasets.Dataset` (Arrow files in the hub's own cache, not in memory).

    Raises LeanSurgeonError in one sentence when it cannot be had: which, from where, and `by_hand`, how to bring it.
    """
    import datasets

    try:
        return datasets.load_dataset(name, config, split=split)
    except Exception as error:
        # The client has an exception of its own for every layer it goes through, and changes them between versions.
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        what = f"{name} ({config})" if config else name
        reason = "this machine is set to work offline" if _offline() else said.rstrip(".")
        raise LeanSurgeonError(
            f"The data set {what}, split {split}, cannot be fetched from huggingface.co/datasets/{name}: {reason}.",
            by_hand,
        ) from error


def digest(dataset: Any) -> str:
    """What stands for the content in a cache key."""
    return str(dataset._fingerprint)


def rows(dataset: Any, columns: list[str], name: str) -> Iterator[tuple[int, list[Any]]]:
    """(row number from 1, the values of `columns`) of every row, as `tables.read` gives them."""
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


def _offline() -> bool:
    return any(os.environ.get(key, "").upper() in ("1", "TRUE", "YES", "ON") for key in _OFFLINE)
