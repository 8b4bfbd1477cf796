"""Cache of inferred declarations in the user's cache folder, as JSON.

A file is named by a digest of the config, the library's version, its modelling file and the code of this package, so a
change in any of them leads to a new inference. An unreadable file counts as missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from leansurgeon.architectures.base import Architecture, Config
from leansurgeon.architectures.infer.finding import Finding
from leansurgeon.errors import UsageError
from leansurgeon.reading import jsonfile
from leansurgeon.reading.cache_folder import cache_folder

Kept = TypeVar("Kept", Architecture, Finding)
STALE_SECONDS = 3600  # an older unfinished file belongs to a killed process: writing takes a moment
PART = ".part"
UNSAID = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "id2label", "label2id")


def folder() -> Path:
    return cache_folder() / "families"


def config_digest(config: Config, tower: str | None = None) -> str:
    """Return a cache key for this config (and its tower), this library and this code."""
    said = {k: v for k, v in config.items() if k not in UNSAID}
    parts = [
        json.dumps(said, sort_keys=True, default=str),
        str(len(config.get("id2label") or {}) or None),
        str(tower),
        version("transformers"),
        own_digest(),
        modelling_digest(str(config.get("model_type"))),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def key_numbers(small: Config) -> Config:
    """Return the part of a small config that affects the result; head_dim is tried in any case, even if unset."""
    parts = {k: v for k, v in small.items() if k not in (*UNSAID, "head_dim")}
    return {k: key_numbers(v) if isinstance(v, dict) else v for k, v in parts.items()}


@cache
def own_digest() -> str:
    room = Path(__file__).parent
    beside = (room.parent / f"{name}.py" for name in ("axes", "base", "tensors", "limits", "towers"))
    return _digest(sorted([*room.rglob("*.py"), *beside]))


@cache
def modelling_digest(model_type: str) -> str:
    """Return the digest of the library's files of a type, without importing them."""
    spec = find_spec("transformers")
    room = Path(spec.origin).parent / "models" / model_type.replace("-", "_")
    return _digest(sorted(room.glob("*.py")))


def _digest(files: list[Path]) -> str:
    sha256 = hashlib.sha256()
    for file in files:
        sha256.update(file.name.encode() + file.read_bytes())
    return sha256.hexdigest()


def read(key: str, kind: type[Kept]) -> Kept | None:
    """Return the record of this `kind` stored under `key`; None if there is none."""
    try:
        return TypeAdapter(kind).validate_python(jsonfile.read_object(folder() / f"{key}.json"))
    except (UsageError, ValueError, TypeError):
        return None


def write(key: str, made: Architecture | Finding) -> None:
    """Store the fields that differ from their defaults; if the folder cannot be written, inference just runs again."""
    document = TypeAdapter(type(made)).dump_json(made, exclude_defaults=True)
    with suppress(OSError):
        folder().mkdir(parents=True, exist_ok=True)
        sweep()
        handle, name = tempfile.mkstemp(dir=folder(), suffix=PART)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(document)
            os.replace(name, folder() / f"{key}.json")
        finally:  # leaves nothing behind on a full disk
            Path(name).unlink(missing_ok=True)


def sweep() -> None:
    """Delete what killed processes left."""
    for part in folder().glob(f"*{PART}"):
        with suppress(OSError):
            if time.time() - part.stat().st_mtime > STALE_SECONDS:
                part.unlink()
