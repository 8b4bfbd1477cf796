"""Values of foreign JSON as a program can trust them: whatever is odd becomes None, or empty."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime

from leansurgeon.reading.jsonfile import Json, JsonObject


def number(value: object) -> float | None:
    """A finite number; None for everything else that may stand in its place."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer beyond any float
        return None


def whole(value: object) -> int | None:
    """A number without its fraction."""
    known = number(value)
    return None if known is None else int(known)


def text(value: object, default: str = "") -> str:
    """One line without control characters: a name from a file must not steer the terminal."""
    said = "".join(c if c.isprintable() else "?" for c in value).strip() if isinstance(value, str) else ""
    return said or default


def items(value: object) -> list[Json]:
    """The value if it is a list, else an empty one."""
    return list(value) if isinstance(value, list | tuple) else []


def objects(value: object) -> list[JsonObject]:
    """The objects of a list; empty where it is none."""
    return [item for item in items(value) if isinstance(item, dict)]


def figures(value: object) -> dict[str, float]:
    """The names of an object whose values are numbers, with these."""
    known = value if isinstance(value, Mapping) else {}
    return {text(key): n for key, item in known.items() if (n := number(item)) is not None}


def words(value: object) -> dict[str, str]:
    """The names of an object whose values are text, with these."""
    known = value if isinstance(value, Mapping) else {}
    return {text(key): text(item) for key, item in known.items() if text(item)}


def stamp(said: Json) -> float | None:
    """Seconds since 1970 of an ISO date or a number."""
    if number(said) is not None:
        return float(said)
    try:
        return datetime.fromisoformat(said).timestamp()
    except (TypeError, ValueError, OverflowError, OSError):
        return None
