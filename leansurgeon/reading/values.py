"""Safe values from foreign JSON: anything unexpected becomes None, or empty."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime

from leansurgeon.reading.jsonfile import Json, JsonObject


def number(value: object) -> float | None:
    """Return a finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer beyond any float
        return None


def whole(value: object) -> int | None:
    """Return a number truncated to an integer; None for anything else."""
    known = number(value)
    return None if known is None else int(known)


def text(value: object, default: str = "") -> str:
    """Return one line without control characters: a name from a file must not control the terminal."""
    said = "".join(c if c.isprintable() else "?" for c in value).strip() if isinstance(value, str) else ""
    return said or default


def items(value: object) -> list[Json]:
    """Return the value if it is a list, else an empty one."""
    return list(value) if isinstance(value, list | tuple) else []


def objects(value: object) -> list[JsonObject]:
    """Return the objects of a list; empty if it is not a list."""
    return [item for item in items(value) if isinstance(item, dict)]


def figures(value: object) -> dict[str, float]:
    """Return the entries of an object whose values are numbers."""
    known = value if isinstance(value, Mapping) else {}
    return {text(key): n for key, item in known.items() if (n := number(item)) is not None}


def words(value: object) -> dict[str, str]:
    """Return the entries of an object whose values are text."""
    known = value if isinstance(value, Mapping) else {}
    return {text(key): text(item) for key, item in known.items() if text(item)}


def stamp(said: Json) -> float | None:
    """Return the seconds since 1970 of an ISO date or a number; None for anything else."""
    if number(said) is not None:
        return float(said)
    try:
        return datetime.fromisoformat(said).timestamp()
    except (TypeError, ValueError, OverflowError, OSError):
        return None
