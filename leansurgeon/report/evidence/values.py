"""Values of foreign JSON as a program can trust them: whatever is odd becomes None, or empty."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from leansurgeon.reading.jsonfile import Json, JsonObject
from leansurgeon.training.runs import summary
from leansurgeon.training.runs.summary import number


def whole(value: Json) -> int | None:
    """A number, or the `total` of an object, without its fraction."""
    found = number(part(value, "total") if isinstance(value, dict) else value)
    return None if found is None else int(found)


def part(data: Json, *keys: str) -> Any:
    """`data[a][b]...`, or None as soon as something is missing."""
    for key in keys:
        if not isinstance(data, dict):
            return None
        data = data.get(key)
    return data


def text(value: Json, default: str = "") -> str:
    """One line without control characters (a name from a file must not steer the terminal)."""
    return summary.text(value) or default


def objects(value: Json) -> list[JsonObject]:
    """The objects of a list; empty where it is none."""
    return [item for item in items(value) if isinstance(item, dict)]


def items(value: Json) -> list[Json]:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def numbers(value: Json) -> tuple[int, ...]:
    """The whole numbers of a list."""
    return tuple(n for item in items(value) if (n := whole(item)) is not None)


def figures(value: Json) -> dict[str, float]:
    """The names of an object whose values are numbers, with these."""
    found = value if isinstance(value, Mapping) else {}
    return {text(key): n for key, item in found.items() if (n := number(item)) is not None}


def words(value: Json) -> dict[str, str]:
    """The names of an object whose values are text, with these."""
    found = value if isinstance(value, Mapping) else {}
    return {text(key): text(item) for key, item in found.items() if text(item)}


def sentences(values: Iterable[Json]) -> tuple[str, ...]:
    """Those of the values that are non-empty text."""
    return tuple(said for value in values if (said := text(value)))


def stamp(said: Json) -> float | None:
    """Seconds since 1970 of an ISO date or a number."""
    if number(said) is not None:
        return float(said)
    try:
        return datetime.fromisoformat(said).timestamp()
    except (TypeError, ValueError, OverflowError, OSError):
        return None
