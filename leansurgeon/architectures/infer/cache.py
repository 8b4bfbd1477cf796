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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, fields
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from leansurgeon.architectures.base import Architecture, Keys, Tensor
from leansurgeon.architectures.infer.finding import Finding, Part, Stage
from leansurgeon.architectures.tensors import Blocks
from leansurgeon.errors import UsageError
from leansurgeon.reading import jsonfile
from leansurgeon.reading.cache_folder import cache_folder
from leansurgeon.reading.jsonfile import JsonObject

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


def said(small: Mapping[str, Any]) -> dict[str, Any]:
    """What of a small config decides what is found on it; a head_dim is tried in any case, also where none is named."""
    parts = {k: v for k, v in small.items() if k not in (*UNSAID, "head_dim")}
    return {k: said(v) if isinstance(v, dict) else v for k, v in parts.items()}


@cache
def own_digest() -> str:
    room = Path(__file__).parent
    beside = (room.parent / f"{name}.py" for name in ("base", "tensors", "limits", "towers"))
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


def read(key: str, made: Callable[[JsonObject], Kept]) -> Kept | None:
    """What is kept under `key`, `made` (by `declaration` or `finding`) of its document; None where nothing is."""
    try:
        return made(jsonfile.read_object(folder() / f"{key}.json"))
    except (UsageError, ValueError, TypeError, KeyError, AttributeError):
        return None


def write(key: str, made: Architecture | Finding) -> None:
    """Keep the fields that differ from their defaults; a folder that cannot be written costs only time."""
    usual = {one.name: one.default if one.default_factory is MISSING else one.default_factory() for one in fields(made)}
    document = {name: value for name, value in asdict(made).items() if getattr(made, name) != usual[name]}
    with suppress(OSError):
        folder().mkdir(parents=True, exist_ok=True)
        sweep()
        handle, name = tempfile.mkstemp(dir=folder(), suffix=PART)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(document, file)
            os.replace(name, folder() / f"{key}.json")
        finally:  # of a full disk nothing stays
            Path(name).unlink(missing_ok=True)


def sweep() -> None:
    """Take away what killed processes have left."""
    for part in folder().glob(f"*{PART}"):
        with suppress(OSError):
            if time.time() - part.stat().st_mtime > STALE_SECONDS:
                part.unlink()


def finding(document: JsonObject) -> Finding:
    """What was found, as `write` has kept it."""
    return Finding(**_tuples(document) | {"stages": tuple(map(_stage, document["stages"]))})


def _stage(document: Mapping[str, Any]) -> Stage:
    parts = {name: _part(document[name]) for name in ("heads", "mlp")}
    return Stage(**_tuples(document) | parts)


def _part(document: Mapping[str, Any] | None) -> Part | None:
    if document is None:
        return None
    axes = {t: tuple((axis, word) for axis, word in places) for t, places in document["axes"].items()}
    return Part(document["key"], axes, tuple(document["sinks"]))


def _tuples(document: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in document.items()}


def declaration(document: JsonObject) -> Architecture:
    """A declaration, as `write` has kept it."""
    stages = tuple(Blocks(**_with_tensors(stage, "block")) for stage in document["stages"])
    return Architecture(**_with_tensors(document, "outer") | {"stages": stages})


def _with_tensors(document: JsonObject, name: str) -> dict[str, Any]:
    tensors = tuple(Tensor(**_tuples(one)) for one in document[name])
    return _tuples(document) | {"keys": Keys(**document["keys"]), name: tensors}
