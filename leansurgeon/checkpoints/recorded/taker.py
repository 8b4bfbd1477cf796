"""Values of surgery.json by their kind: what is missing is a default, what is of the wrong kind is damage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass
from typing import Any, ClassVar, Self, get_args, get_origin

from leansurgeon.checkpoints.recorded.part import default_of, kinds, plain
from leansurgeon.errors import UnsupportedModel
from leansurgeon.reading.jsonfile import Json, JsonObject

NAME = "surgery.json"
NO_KEY = {"no_key": True}  # of a field that is no key of the file


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


@dataclass(frozen=True)
class Strict:
    """A value that stands in surgery.json as an object, a key for every field. What a field may hold follows from its
    type: one that is missing or null has the field's default, and all else is damage.
    """

    WHERE: ClassVar[str]  # what damage calls it
    OPTIONAL: ClassVar[tuple[str, ...] | None] = None  # fields that are left out where they are empty; None: all
    KEYS: ClassVar[Mapping[str, str]] = {}  # of fields that have another name in the file

    @classmethod
    def entries(cls) -> Iterator[tuple[Field, str, Any]]:
        """Every field that the file has, with its key and type."""
        return (
            (one, cls.KEYS.get(one.name, one.name), kind) for one, kind in kinds(cls) if "no_key" not in one.metadata
        )

    @classmethod
    def from_dict(cls, data: Json) -> Self:
        """Raises `DamagedRecord`."""
        take = Taker(data, cls.WHERE)
        values = {}
        for one, key, kind in cls.entries():
            if take.data.get(key) is not None:
                values[one.name] = of_kind(take, key, kind)
            elif default_of(one) is MISSING:
                raise take.damage(key, "is missing")
        return cls(**values)

    def as_dict(self) -> JsonObject:
        """As the file holds it."""
        values = {(one.name, key): getattr(self, one.name) for one, key, _ in self.entries()}
        return {
            key: plain(value)
            for (name, key), value in values.items()
            if value not in (None, {}, ()) or (self.OPTIONAL is not None and name not in self.OPTIONAL)
        }


def of_kind(take: Taker, key: str, kind: Any) -> Any:
    """The value of a key that is there as one of this type. Raises `DamagedRecord`."""
    form, inner = get_origin(kind), get_args(kind)
    if type(None) in inner:
        return of_kind(take, key, inner[0])
    if form is tuple:
        return take.several(key, dict if get_origin(inner[0]) else inner[0])  # a list of values, or of objects
    if form is Mapping:
        if inner[1] is str:
            return take.words(key)
        values = take(key, dict)
        return values if inner[1] is Any else {name: inner[1].from_dict(value) for name, value in values.items()}
    if not hasattr(kind, "from_dict"):
        return take(key, kind)
    return kind.from_dict(take.data[key] if issubclass(kind, Strict) else take(key, dict))
