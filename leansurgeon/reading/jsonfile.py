"""Foreign JSON: config.json, indices, records, headers, lines of data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from leansurgeon.errors import UsageError
from leansurgeon.reading import files

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"  # any value of a document
JsonObject: TypeAlias = dict[str, Any]  # an object, as read or to be written

LIMIT = 32_000_000  # bytes; at worst some 20 times as many in memory
_KINDS = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
}


def read(path: Path) -> Any:
    """Return the value of a JSON file. Raises `UsageError` naming the file and what is wrong with it."""
    return parse(files.read_bytes(path, LIMIT), str(path))


def read_object(path: Path) -> JsonObject:
    """Like `read`, for a file that must hold an object."""
    value = read(path)
    if not isinstance(value, dict):
        raise UsageError(f"{path} holds {a_kind_of(value)} where a JSON object is expected.")
    return value


def read_object_if_whole(path: Path) -> JsonObject | None:
    """Like `read_object`, but None if it does not exist or cannot be read: for optional files."""
    try:
        return read_object(path)
    except UsageError:
        return None


def parse(text: str | bytes, where: str) -> Any:
    """Parse a JSON document. Raises `UsageError`; `where` begins its sentence."""
    try:
        text = text.decode() if isinstance(text, bytes) else text
        value = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError:
        raise UsageError(f"{where} holds half of a surrogate pair, which is not text.") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not UTF-8 text: byte {error.start:,} cannot be read.") from None
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{where} is not valid JSON: {error.msg.lower()}, line {error.lineno:,}, column {error.colno:,}."
        ) from None
    except (ValueError, RecursionError) as error:  # a number or a nesting without measure
        raise UsageError(f"{where} cannot be read: {error}.") from None


def a_kind_of(value: Json) -> str:
    """Describe the type of a JSON value in words."""
    return _KINDS.get(type(value), type(value).__name__)


def value_at(data: Json, *path: str) -> Any:
    """Return the value at `path` in nested objects; None if any of them is missing or of another type."""
    for key in path:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def by_dotted_key(data: Json, path: str = "") -> JsonObject:
    """Flatten nested objects by joining keys with dots: `{"a": {"b": 1}}` becomes `{"a.b": 1}`."""
    if not isinstance(data, Mapping):
        return {path: data}
    parts = (by_dotted_key(value, f"{path}.{key}" if path else str(key)) for key, value in data.items())
    return {key: value for part in parts for key, value in part.items()}
