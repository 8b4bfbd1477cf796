"""Values of surgery.json by their kind: what is missing is a default, what is of the wrong kind is damage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from leansurgeon.errors import UnsupportedModel
from leansurgeon.reading.jsonfile import Json

NAME = "surgery.json"


class DamagedRecord(UnsupportedModel):
    """A surgery.json that cannot be read, or holds something else than a record."""


class Taker:
    """Values of a JSON object by their kind; what is missing or null is the default."""

    def __init__(self, data: Json, where: str) -> None:
        if not isinstance(data, Mapping):
            raise DamagedRecord(f"{NAME} is damaged: '{where}' is no object.")
        self.data, self.where = data, where

    def damage(self, key: str, what: str) -> DamagedRecord:
        """The error for a key of this part of the record."""
        return DamagedRecord(f"{NAME} is damaged: '{key}' in '{self.where}' {what}.")

    def __call__(self, key: str, kind: type, default: Any = None, *, needed: bool = False) -> Any:
        value = self.data.get(key)
        if value is None:
            if needed:
                raise self.damage(key, "is missing")
            return default
        good = is_number(value) if kind is float else isinstance(value, kind)
        if not good or (kind is int and isinstance(value, bool)):
            raise self.damage(key, f"is no {kind.__name__}")
        return value

    def several(self, key: str, kind: type) -> tuple:
        """A list of values of one kind as a tuple, empty without the key; DamagedRecord for any other value."""
        values = self(key, list, [])
        if not all(isinstance(value, kind) and not (kind is int and isinstance(value, bool)) for value in values):
            raise self.damage(key, f"holds something else than {kind.__name__}")
        return tuple(values)

    def words(self, key: str) -> dict[str, str]:
        """An object of strings, empty without the key; DamagedRecord for any other value."""
        words = self(key, dict, {})
        if not all(isinstance(value, str) for value in words.values()):
            raise self.damage(key, "holds something else than words")
        return words

    def part(self, key: str, read: Callable[[object], Any]) -> Any:
        """What `read` makes of the value, None without one."""
        value = self.data.get(key)
        return None if value is None else read(value)


def is_number(value: Json) -> bool:
    """Whether the value is a number; booleans are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)
