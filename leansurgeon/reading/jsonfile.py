"""Foreign JSON: config.json, indices, records, headers, lines of data.

Python's own reader accepts numbers of any length and duplicate keys, and overflows its stack on deep nesting; here each
of these is reported in one sentence.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from leansurgeon.errors import UsageError, quote
from leansurgeon.reading import files

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"  # any value of a document
JsonObject: TypeAlias = dict[str, Any]  # an object, as read or to be written

LIMIT = 32_000_000  # bytes; at worst some 20 times as many in memory
DEPTH = 64
DIGITS = 64  # tokenizers write "no limit" as a number of 31 digits
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


_KINDS = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
}


class _Refused(Exception):
    """Raised for forbidden content; its text is the end of a sentence."""


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
    """Parse a JSON document, at most `DEPTH` levels deep. Raises `UsageError`; `where` begins its sentence."""
    try:
        if isinstance(text, bytes):
            text = text.decode()
        value = json.loads(text, parse_int=_integer, object_pairs_hook=_no_key_twice)
        _check(value, surrogates=_ESCAPED_SURROGATE.search(text) is not None)
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not UTF-8 text: byte {error.start:,} cannot be read.") from None
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{where} is not valid JSON: {error.msg.lower()}, line {error.lineno:,}, column {error.colno:,}."
        ) from None
    except RecursionError:
        raise UsageError(f"{where} is nested more than {DEPTH} levels deep.") from None
    except _Refused as error:
        raise UsageError(f"{where} {error}.") from None
    return value


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


def _integer(digits: str) -> int:
    if len(digits) > DIGITS:
        raise _Refused(f"holds a number of {len(digits):,} digits, more than {DIGITS}")
    return int(digits)


def _no_key_twice(pairs: list[tuple[str, Any]]) -> JsonObject:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise _Refused(f"says {quote(twice)} twice")
    return unique


def _check(value: Json, surrogates: bool) -> None:
    """Reject deep nesting, and text that cannot be written again, without recursion."""
    level = [value]
    for _ in range(DEPTH + 1):
        if surrogates:
            texts = [v for v in level if isinstance(v, str)] + [k for v in level if isinstance(v, dict) for k in v]
            if not all(map(files.encodable, texts)):
                raise _Refused("holds half of a surrogate pair, which is not text")
        containers = [item for item in level if isinstance(item, dict | list)]
        if not containers:
            return
        level = [inner for c in containers for inner in (c.values() if isinstance(c, dict) else c)]
    raise RecursionError
