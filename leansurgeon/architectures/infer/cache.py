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
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from leansurgeon.architectures.base import Architecture, Keys, Tensor
from leansurgeon.architectures.infer.finding import Finding, Part, Stage
from leansurgeon.architectures.tensors import Blocks
from leansurgeon.errors import UsageError
from leansurgeon.reading import jsonfile
from leansurgeon.reading.jsonfile import JsonObject

STALE_SECONDS = 3600  # a file that was begun longer ago belongs to a process that was killed: writing takes a moment
PART = ".part"
UNSAID = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "id2label", "label2id")
# What a declaration that was inferred may hold; all else keeps its default.
FIELDS = (
    *(
        "name",
        "library",
        "model_types",
        "norm",
        "causal",
        "positions",
        "prefixes",
        "tied",
        "per_layer",
        "forget",
        "plain",
    ),
    *("counters", "index_lists", "uneven", "refused", "evidence", "heads_entangled", "heads_unsplittable"),
    *("heads_divide_width", "decoupled", "shared", "section", "period", "init_std", "taps", "stay"),
)


def folder() -> Path:
    given = os.environ.get("LEANSURGEON_CACHE")
    root = given or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leansurgeon"
    return Path(root) / "families"


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


def read_declaration(key: str) -> Architecture | None:
    try:
        return from_json(jsonfile.read(folder() / f"{key}.json"))
    except (UsageError, ValueError, TypeError, KeyError):
        return None


def write_declaration(key: str, made: Architecture) -> None:
    """Keep a declaration; a folder that cannot be written costs only time."""
    _write(key, to_json(made))


def read_finding(key: str) -> Finding | None:
    try:
        document = jsonfile.read_object(folder() / f"{key}.json", raising=UsageError)
        return Finding(**_tuples(document) | {"stages": tuple(map(_stage, document["stages"]))})
    except (UsageError, ValueError, TypeError, KeyError):
        return None


def write_finding(key: str, finding: Finding) -> None:
    """Keep what was found; the same holds for every model that is the same when it is made small."""
    _write(key, asdict(finding))


def _stage(document: Mapping[str, Any]) -> Stage:
    parts = {name: _part(document[name]) for name in ("heads", "mlp")}
    axes = {name: {t: tuple(a) for t, a in document[name].items()} for name in ("widths", "head_dims")}
    return Stage(**_tuples(document) | parts | axes)


def _part(document: Mapping[str, Any] | None) -> Part | None:
    if document is None:
        return None
    axes = {t: tuple((axis, word) for axis, word in places) for t, places in document["axes"].items()}
    return Part(document["key"], axes, tuple(document["sinks"]))


def _tuples(document: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in document.items()}


def _write(key: str, document: JsonObject) -> None:
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


def to_json(made: Architecture) -> JsonObject:
    return {name: getattr(made, name) for name in FIELDS} | {
        "keys": asdict(made.keys),
        "outer": [short(t) for t in made.outer],
        "stages": [
            {"layer": s.layer, "projection": s.projection, "keys": asdict(s.keys), "block": [short(t) for t in s.block]}
            for s in made.stages
        ],
    }


def short(tensor: Tensor) -> list[Any]:
    return [tensor.name, tensor.role, tensor.axes, tensor.group, tensor.layers]


def from_json(document: Mapping[str, Any]) -> Architecture:
    plain = {k: tuple(v) if isinstance(v, list) else v for k, v in document.items() if k in FIELDS}
    return Architecture(
        **plain,
        keys=Keys(**document["keys"]),
        outer=tuple(map(tensor, document["outer"])),
        stages=tuple(
            Blocks(s["layer"], tuple(map(tensor, s["block"])), tuple(s["projection"]), Keys(**s["keys"]))
            for s in document["stages"]
        ),
    )


def tensor(values: list[Any]) -> Tensor:
    name, role, axes, group, layers = values
    return Tensor(name, role, axes, group=group, layers=None if layers is None else tuple(layers))
