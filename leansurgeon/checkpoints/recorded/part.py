"""The base of every part of a record: a value whose fields are the keys of a JSON object.

The type of a field decides what it may hold. If a part is only shown, a missing or odd value becomes the field's
default, or else empty, and a list with an odd entry becomes empty as a whole: versions differ. If a program relies on a
field (`SURE`), an odd value is damage, and so is a missing one without a default.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, ClassVar, Self, Union, get_args, get_origin, get_type_hints

from leansurgeon.errors import UnsupportedModel, UsageError
from leansurgeon.reading.jsonfile import Json, JsonObject
from leansurgeon.reading.values import number, text, whole

NAME = "surgery.json"
FORMS = {str: str, int: int, float: (int, float), bool: bool}
READ: Mapping[type, Callable[[Json], Json]] = {str: lambda value: text(value) or None, int: whole, float: number}
EMPTY = {str: "", int: 0, bool: False, tuple: (), Mapping: {}}
INSIDE = {"inside": True}  # marks a field without a key of its own: the keys of its value are inlined


class DamagedRecord(UnsupportedModel):
    """A surgery.json that cannot be read or holds no record."""


class OddValue(ValueError):
    """A value that does not match its field's type."""


@dataclass(frozen=True)
class Recorded:
    """A value stored as a JSON object with a key for every field.

    A field at its default is omitted unless it is in `required`. A value that was read is written back unchanged, with
    keys that this version does not know (`raw`); a changed copy (`dataclasses.replace`) is written from its fields.
    """

    WHERE = ""  # name of this part in error messages
    SURE = ()  # fields whose odd values are damage; None: all
    KEYS: ClassVar[Mapping[str, str]] = {}  # fields with another name in the file
    required = ()  # fields that are always written
    raw: JsonObject | None = field(init=False, default=None, repr=False, compare=False)

    @classmethod
    def from_dict(cls, data: Json) -> Self:
        """Read the value from an object of the file. Raises `DamagedRecord`."""
        if not isinstance(data, Mapping):
            raise DamagedRecord(f"{NAME} is damaged: '{cls.WHERE}' is no object.")
        return cls.within(data)._of(data)

    def _of(self, data: Mapping[str, Json]) -> Self:
        """Return the value with the object it was read from."""
        object.__setattr__(self, "raw", dict(data))
        return self

    @classmethod
    def within(cls, data: Mapping[str, Json]) -> Self:
        """Read the value from an object that may have other keys as well."""
        values = {}
        for key, one, kind in kinds(cls):
            sure = cls.SURE is None or one.name in cls.SURE
            try:
                if one.metadata:
                    values[one.name] = kind.within(data)
                elif data.get(key) is not None:
                    values[one.name] = read_value(kind, data[key], sure)
                elif default_of(one) is MISSING:
                    raise OddValue("is missing")
            except OddValue as odd:
                if sure:
                    raise DamagedRecord(f"{NAME} is damaged: '{key}' in '{cls.WHERE}' {odd}.") from None
                if default_of(one) is MISSING:
                    values[one.name] = EMPTY.get(get_origin(kind) or kind)
        return cls(**values)

    def as_dict(self) -> JsonObject:
        """Return the object as the file holds it."""
        if self.raw is not None:
            return plain(self.raw)  # a copy, so that changing it does not change the record
        document = {}
        for key, one, _ in kinds(type(self)):
            value = getattr(self, one.name)
            if one.metadata:
                document |= value.as_dict()
            elif value != default_of(one) or one.name in self.required:
                document[key] = plain(value)
        return document


@dataclass(frozen=True)
class RecordedInFull(Recorded):
    """A part that is written in full, except for `OPTIONAL` fields at their default.

    Keys of later versions are kept (`other`), in a changed copy too.
    """

    SURE = None
    OPTIONAL = ()  # fields omitted at their default
    other: JsonObject = field(default_factory=dict, kw_only=True, repr=False)

    def _of(self, data: Mapping[str, Json]) -> Self:
        known = {key for key, *_ in kinds(type(self))}
        return replace(self, other={key: data[key] for key in data if key not in known})

    @property
    def required(self) -> Collection[str]:
        """All but the optional fields."""
        return {one.name for _, one, _ in kinds(type(self))} - set(self.OPTIONAL)

    def as_dict(self) -> JsonObject:
        """Return the object as the file holds it."""
        return super().as_dict() | plain(self.other)


@cache
def kinds(part: type[Recorded]) -> tuple[tuple[str, Field, Any], ...]:
    """Return the stored fields of a part, with their keys in the file and their types."""
    hints, own = get_type_hints(part), (one for one in fields(part) if one.name not in ("raw", "other"))
    return tuple((part.KEYS.get(one.name, one.name), one, hints[one.name]) for one in own)


def read_value(kind: Any, value: Json, sure: bool = False) -> Any:
    """Convert a value of the file to this type. Raises `OddValue`, and `DamagedRecord` for damage inside it."""
    form, inner, may_be_odd = get_origin(kind), get_args(kind), nullcontext() if sure else suppress(OddValue)
    if form in (Union, UnionType):
        for one in inner:
            with suppress(OddValue):
                return read_value(one, value, sure)
    elif form is tuple and isinstance(value, list | tuple):
        with may_be_odd:
            return tuple(read_value(inner[0], item, sure) for item in value)
        return ()  # positions carry meaning, so a list is not read in part
    elif form in (dict, Mapping) and isinstance(value, Mapping):
        if form is dict or inner[1] is Any:  # of any type
            return value
        known = {}
        for key, item in value.items():
            with may_be_odd:
                known[key if sure else text(key)] = read_value(inner[1], item, sure)
        return known
    elif kind in FORMS:
        known = READ[kind](value) if kind in READ and not sure else value
        if isinstance(known, FORMS[kind]) and isinstance(known, bool) == (kind is bool):
            return known
    elif form is None and isinstance(value, Mapping) and kind is not NoneType:
        with suppress(KeyError, TypeError, ValueError, AttributeError, UsageError):  # raised by `Shape`
            return kind.from_dict(value)
    raise OddValue(f"is no {getattr(kind, '__name__', kind)}")


def default_of(one: Field) -> Any:
    """Return the default of a field; MISSING, which equals nothing, if it has none."""
    return one.default_factory() if one.default_factory is not MISSING else one.default


def plain(value: Any) -> Json:
    """Convert a value to its JSON form."""
    if hasattr(value, "as_dict"):
        return value.as_dict()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
