"""Declarations that were inferred, kept in the user's cache folder as JSON.

A file's name is a digest of the config, the library's version, its modelling file and this room's own code; whatever
changes one of them asks anew. A file that cannot be read is no answer.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from leansurgeon.architectures.base import Architecture
from leansurgeon.architectures.infer.finding import Finding
from leansurgeon.errors import UsageError
from leansurgeon.reading import jsonfile
from leansurgeon.reading.cache_folder import cache_folder

Kept = TypeVar("Kept", Architecture, Finding)
STALE_SECONDS = 3600  # a file that was begun longer ago belongs to a process that was killed: writing takes a moment
PART = ".part"
UNSAID = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "id2label", "label2id")


def folder() -> Path:
    return cache_folder() / "families"


def config_digest(config: Mapping[str, Any], tower: str | None = None) -> str:
    """A name for what is asked: this config (and tower of it), of this library, by this code."""
    said = {k: v for k, v in config.items() if k not in UNSAID}
    labels = len(config.get("id2label") or {}) or None
    parts = [
        json.dumps(said, sort_keys=True, default=str),
        str(labels),
        str(tower),
        version("transformers"),
        own_digest(),
        modelling_digest(str(config.get("model_type"))),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def key_numbers(small: Mapping[str, Any]) -> dict[str, Any]:
    """What of a small config decides what is found on it; a head_dim is tried in any case, also where none is named."""
    parts = {k: v for k, v in small.items() if k not in (*UNSAID, "head_dim")}
    return {k: key_numbers(v) if isinstance(v, dict) else v for k, v in parts.items()}


@cache
def own_digest() -> str:
    room = Path(__file__).parent
    beside = (room.parent / f"{name}.py" for name in ("axes", "base", "tensors", "limits", "towers"))
    return _digest(sorted([*room.rglob("*.py"), *beside]))


@cache
def modelling_digest(model_type: str) -> str:
    """Of the library's files of a type, found without importing it."""
    spec = find_spec("transformers")
    room = Path(spec.origin).parent / "models" / model_type.replace("-", "_")
    return _digest(sorted(room.glob("*.py")))


def _digest(files: list[Path]) -> str:
    sha256 = hashlib.sha256()
    for file in files:
        sha256.update(file.name.encode() + file.read_bytes())
    return sha256.hexdigest()


def read(key: str, kind: type[Kept]) -> Kept | None:
    """The record of this `kind` that is kept under `key`; None where there is none."""
    try:
        return TypeAdapter(kind).validate_python(jsonfile.read_object(folder() / f"{key}.json"))
    except (UsageError, ValueError, TypeError):
        return None


def write(key: str, made: Architecture | Finding) -> None:
    """Keep the fields that differ from their defaults; a folder that cannot be written costs only time."""
    document = TypeAdapter(type(made)).dump_json(made, exclude_defaults=True)
    with suppress(OSError):
        folder().mkdir(parents=True, exist_ok=True)
        sweep()
        handle, name = tempfile.mkstemp(dir=folder(), suffix=PART)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(document)
            os.replace(name, folder() / f"{key}.json")
        finally:  # of a full disk nothing stays
            Path(name).unlink(missing_ok=True)


def sweep() -> None:
    """Take away what killed processes have left."""
    for part in folder().glob(f"*{PART}"):
        with suppress(OSError):
            if time.time() - part.stat().st_mtime > STALE_SECONDS:
                part.unlink()
