"""Remove this machine's paths from text that is published: records and model cards.

A relative path or a hub id is kept as it was typed; of an absolute path only the last part is kept. The digests
identify the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from leansurgeon.reading.files import writable
from leansurgeon.reading.jsonfile import Json, JsonObject

OF_A_RUN = ("model", "last")  # subfolders of a run, whose names say nothing about it
# An absolute path within a text: preceded by nothing, a blank or an opening sign, and ending at the next of them.
_IN_TEXT = re.compile(r"(?:(?<=^)|(?<=[\s='\"(\[]))(?:~?/(?=[\w.])|[A-Za-z]:[\\/])[^\s,;:'\")\]]*[^\s,;:.'\")\]]")


def public(name: str) -> str:
    """Return a name without its location on this machine.

    >>> public("/home/somebody/models/llama/"), public("runs/lean"), public("org/name")
    ('llama', 'runs/lean', 'org/name')
    >>> public("/home/somebody/runs/lean-s0/last")  # every run has a `last`
    'lean-s0/last'
    """
    if not is_place(name):
        return writable(name)
    parts = [writable(part) for part in re.split(r"[\\/]", name) if part not in ("", ".", "~")]
    if len(parts) > 1 and parts[-1] in OF_A_RUN:
        return "/".join(parts[-2:])
    return parts[-1] if parts else "model"


def is_place(name: str) -> bool:
    """Return whether a name starts at the root of the file system or at a home directory."""
    return name.startswith(("/", "~", "\\\\")) or re.match(r"[A-Za-z]:[\\/]", name) is not None


def without_places(value: Json) -> Any:
    """Return the value with absolute paths removed from its texts.

    A path may be the whole text, stand between commas, follow `key=`, or be part of a sentence.
    """
    if isinstance(value, Mapping):
        return {key: without_places(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_places(item) for item in value]
    if not isinstance(value, str) or not ("/" in value or "\\" in value):
        return value
    pieces = []
    for piece in value.split(","):
        key, equals, rest = piece.partition("=")
        if equals and is_place(rest):
            pieces.append(f"{key}={public(rest)}")
        elif is_place(piece) and ": " not in piece:  # a path may contain blanks
            pieces.append(public(piece))
        else:
            pieces.append(_IN_TEXT.sub(lambda match: public(match[0]), piece))
    return ",".join(pieces)


def without_place(config: Mapping[str, Any]) -> JsonObject:
    """Return a model's config without the path that some libraries store in it."""
    said = config.get("_name_or_path")
    local = isinstance(said, str) and is_place(said)
    return {key: value for key, value in config.items() if key != "_name_or_path" or not local}
