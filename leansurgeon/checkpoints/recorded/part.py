"""What every part of the record is: a value whose fields are the keys of its object, written as it was read.

What a field may hold follows from its type alone. A key that is missing, or holds something odd, gives the field's
default, else what is empty of its type; a list with an odd entry is empty as a whole. A record is read to be shown and
to go on with, and versions differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from types import UnionType
from typing import Any, ClassVar, Self, Union, get_args, get_origin, get_type_hints

from leansurgeon.reading.jsonfile import Json, JsonObject
from leansurgeon.reading.values import items, number, text, whole

LEAVES: Mapping[type, Callable[[Json], Json]] = {
    str: lambda value: text(value) or None,
    int: whole,
    float: number,
    bool: lambda value: value if isinstance(value, bool) else None,
}
EMPTY = {str: "", int: 0, bool: False}
INSIDE = {"inside": True}  # of a field without a key of its own: the keys of its value stand among the others


@dataclass(frozen=True)
class Part:
    """A value that stands in surgery.json as an object, a key for every field; a field that has its default is left
    out, unless it is one of `required`. What was read is written again as it was, with all that this version does not
    know (`raw`); a changed copy (`dataclasses.replace`) is written from its fields.
    """

    KEYS: ClassVar[Mapping[str, str]] = {}  # of fields that have another name in the file
    raw: JsonObject | None = field(init=False, default=None, repr=False, compare=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Json]) -> Self:
        """The value of an object of the file."""
        return cls.within(data).as_read(data)

    def as_read(self, data: Mapping[str, Json]) -> Self:
        """The same value, which was read from `data` and is written so."""
        object.__setattr__(self, "raw", dict(data))
        return self

    @classmethod
    def within(cls, data: Mapping[str, Json]) -> Self:
        """The value whose keys stand among others."""
        values = {}
        for one, kind in kinds(cls):
            apart = not one.metadata.get("inside")
            value = taken(kind, data.get(cls.KEYS.get(one.name, one.name))) if apart else kind.within(data)
            if value is not None:
                values[one.name] = value
            elif default_of(one) is MISSING:
                values[one.name] = EMPTY.get(kind)
        return cls(**values)

    @property
    def required(self) -> frozenset[str]:
        """Fields that are written in any case."""
        return frozenset()

    def as_dict(self) -> JsonObject:
        """As the file holds it."""
        if self.raw is not None:
            return plain(self.raw)  # a copy: who changes what it is given changes no record
        document: JsonObject = {}
        for one, _ in kinds(type(self)):
            value = getattr(self, one.name)
            if one.metadata.get("inside"):
                document |= value.as_dict()
            elif value != default_of(one) or one.name in self.required:
                document[self.KEYS.get(one.name, one.name)] = plain(value)
        return document


@cache
def kinds(part: type[Part]) -> tuple[tuple[Field, Any], ...]:
    """The fields that the file has, with their types."""
    hints = get_type_hints(part)
    return tuple((one, hints[one.name]) for one in fields(part) if one.init)


def taken(kind: Any, value: Json) -> Any:
    """A value of the file as one of this type; None where it is none."""
    form, inner = get_origin(kind), get_args(kind)
    if form in (Union, UnionType):
        readings = (taken(one, value) for one in inner if one is not type(None))
        return next((one for one in readings if one is not None), None)
    if form is tuple:
        known = tuple(taken(inner[0], item) for item in items(value))
        return () if None in known else known  # what stands at a place means something there
    if form is dict:  # of any form
        return value if isinstance(value, dict) else None
    if form is not None:
        named = value.items() if isinstance(value, Mapping) else ()
        return {text(key): one for key, item in named if (one := taken(inner[1], item)) is not None}
    if kind in LEAVES:
        return LEAVES[kind](value)
    return kind.from_dict(value) if isinstance(value, Mapping) else None


def default_of(one: Field) -> Any:
    """The default of a field; MISSING, which nothing equals, where it has none."""
    return one.default_factory() if one.default_factory is not MISSING else one.default


def plain(value: Any) -> Json:
    """As JSON holds it."""
    if hasattr(value, "as_dict"):
        return value.as_dict()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
