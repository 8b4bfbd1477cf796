"""What every part of a record is: a value whose fields are the keys of its object.

What a field may hold follows from its type alone. Where the part is to be shown, a key that is missing, or holds
something odd, gives the field's default, else what is empty of its type, and a list with an odd entry is empty as a
whole: versions differ. Where a program builds on it (`SURE`), something odd is damage, and so is a key that is missing
and has no default.
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
INSIDE = {"inside": True}  # of a field without a key of its own: the keys of its value stand among the others


class DamagedRecord(UnsupportedModel):
    """A surgery.json that cannot be read, or holds something else than a record."""


class OddValue(ValueError):
    """A value of the file that is none of its field's type."""


@dataclass(frozen=True)
class Recorded:
    """A value that stands in the file as an object, a key for every field; a field that has its default is left out,
    unless it is one of `required`. What was read is written again as it was, with all that this version does not know
    (`raw`); a changed copy (`dataclasses.replace`) is written from its fields.
    """

    WHERE = ""  # what damage calls it
    SURE = ()  # fields in which something odd is damage; None: all
    KEYS: ClassVar[Mapping[str, str]] = {}  # of fields that have another name in the file
    required = ()  # fields that are written in any case
    raw: JsonObject | None = field(init=False, default=None, repr=False, compare=False)

    @classmethod
    def from_dict(cls, data: Json) -> Self:
        """The value of an object of the file. Raises `DamagedRecord`."""
        if not isinstance(data, Mapping):
            raise DamagedRecord(f"{NAME} is damaged: '{cls.WHERE}' is no object.")
        return cls.within(data)._of(data)

    def _of(self, data: Mapping[str, Json]) -> Self:
        """The same value with what else its object has."""
        object.__setattr__(self, "raw", dict(data))
        return self

    @classmethod
    def within(cls, data: Mapping[str, Json]) -> Self:
        """The value whose keys stand among others."""
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
        """As the file holds it."""
        if self.raw is not None:
            return plain(self.raw)  # a copy: who changes what it is given changes no record
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
    """A part that is written in full, but for what is empty of `OPTIONAL`. What a later version adds is kept beside its
    fields (`other`), in a changed copy too.
    """

    SURE = None
    OPTIONAL = ()  # fields that are left out where they have their default
    other: JsonObject = field(default_factory=dict, kw_only=True, repr=False)

    def _of(self, data: Mapping[str, Json]) -> Self:
        known = {key for key, *_ in kinds(type(self))}
        return replace(self, other={key: data[key] for key in data if key not in known})

    @property
    def required(self) -> Collection[str]:
        """All but the optional ones."""
        return {one.name for _, one, _ in kinds(type(self))} - set(self.OPTIONAL)

    def as_dict(self) -> JsonObject:
        """As the file holds it."""
        return super().as_dict() | plain(self.other)


@cache
def kinds(part: type[Recorded]) -> tuple[tuple[str, Field, Any], ...]:
    """The fields that the file has, with their keys there and their types."""
    hints, own = get_type_hints(part), (one for one in fields(part) if one.name not in ("raw", "other"))
    return tuple((part.KEYS.get(one.name, one.name), one, hints[one.name]) for one in own)


def read_value(kind: Any, value: Json, sure: bool = False) -> Any:
    """A value of the file as one of this type. Raises `OddValue`, and `DamagedRecord` for damage within it."""
    form, inner, may_be_odd = get_origin(kind), get_args(kind), nullcontext() if sure else suppress(OddValue)
    if form in (Union, UnionType):
        for one in inner:
            with suppress(OddValue):
                return read_value(one, value, sure)
    elif form is tuple and isinstance(value, list | tuple):
        with may_be_odd:
            return tuple(read_value(inner[0], item, sure) for item in value)
        return ()  # what stands at a place means something there
    elif form in (dict, Mapping) and isinstance(value, Mapping):
        if form is dict or inner[1] is Any:  # of any form
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
        with suppress(KeyError, TypeError, ValueError, AttributeError, UsageError):  # of a `Shape`
            return kind.from_dict(value)
    raise OddValue(f"is no {getattr(kind, '__name__', kind)}")


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
