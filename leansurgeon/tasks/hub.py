"""Data sets of the Hugging Face hub, and the error if one cannot be fetched."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from leansurgeon.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from datasets import Dataset

_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
_PATIENCE = 1.0  # seconds to wait for the hub, or its proxy, to answer
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

    Raises UsageError if it cannot be had, with its name, its address and `by_hand`, how to get it manually. Fails at
    once if neither the hub can be reached nor the cache has the name.
    """
    # Offline, the library answers at once; otherwise avoid importing it just to fail.
    if not _offline() and not is_cached(name) and not reachable():
        raise missing(name, config, split, by_hand, "the hub cannot be reached from here")
    import datasets

    if not _offline() and not reachable():  # cached: without this the library would retry for half a minute
        import huggingface_hub

        places = (huggingface_hub.constants, datasets.config)
    else:
        places = ()
    before = [place.HF_HUB_OFFLINE for place in places]
    try:
        for place in places:
            place.HF_HUB_OFFLINE = True
        return datasets.load_dataset(name, config, split=split)
    except Exception as error:
        # The client has its own exception for each layer, and they change between versions.
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise missing(name, config, split, by_hand, said.rstrip(".")) from error
    finally:
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value


def missing(name: str, config: str | None, split: str, by_hand: str, reason: str) -> UsageError:
    what = f"{name} ({config})" if config else name
    reason = "this machine is set to work offline" if _offline() else reason
    return UsageError(
        f"The data set {what}, split {split}, cannot be fetched from huggingface.co/datasets/{name}: {reason}.",
        f"{by_hand} {YOURS}",
    )


def is_cached(name: str) -> bool:
    """Return whether the caches of `datasets` or `huggingface_hub` have anything of a data set."""
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets").expanduser()
    fetched = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    places = (prepared / name.replace("/", "___"), fetched / f"datasets--{name.replace('/', '--')}")
    return any(place.exists() for place in places)


def reachable() -> bool:
    """Return whether the hub, or the proxy to it, accepts a connection now."""
    if _offline():
        return False
    hub = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    proxies = (os.environ.get(key) for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))
    target = urlsplit(next((proxy for proxy in proxies if proxy), hub))
    try:
        port = target.port or (443 if target.scheme == "https" else 80)
        with socket.create_connection((target.hostname or "", port), timeout=_PATIENCE):
            return True
    except (OSError, ValueError):
        return False


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


def _offline() -> bool:
    return any(os.environ.get(key, "").upper() in ("1", "TRUE", "YES", "ON") for key in _OFFLINE)
