"""The plan as it was carried out: all that stands under `plan` in surgery.json.

Shapes, kept layers, operators, and how heads were made decide what a model is taken for (`undo`, `diff`, a teacher), so
odd ones are damage; all else is shown, and odd values of it are None or empty (`Part`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from leansurgeon.checkpoints.recorded.part import Part
from leansurgeon.checkpoints.recorded.taker import NAME, DamagedRecord, Taker
from leansurgeon.errors import LeanSurgeonError
from leansurgeon.reading.jsonfile import Json, JsonObject
from leansurgeon.reading.values import text
from leansurgeon.shape import Shape


@dataclass(frozen=True)
class Step(Part):
    """One operator. `exactness`: "exact" leaves the function of what it touches unchanged, "near" approximates it,
    "fresh" forgets it.
    """

    name: str
    exactness: str
    says: str
    settings: JsonObject = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: Json) -> Self:
        """Raises `DamagedRecord`."""
        take = Taker(data, "operators")
        name, exactness, says = (take(key, str, needed=True) for key in ("name", "exactness", "says"))
        return cls(name, exactness, text(says), take("settings", dict, {})).as_read(data)

    @property
    def required(self) -> frozenset[str]:
        """Settings are written, where there are none too."""
        return frozenset({"settings"})


@dataclass(frozen=True)
class Planned(Part):
    """A plan: what is kept of which source, by which operators, and what that saves. `layers` are those of the source
    that are kept; `inferred` is what was found of a family that nobody declared; `method` has its settings by name.
    """

    source: str = ""
    architecture: str = ""
    inferred: JsonObject = field(default_factory=dict)
    head_policy: str | int = ""
    why: str = ""
    init: str = ""
    seed: int | None = None
    method: JsonObject = field(default_factory=dict)
    calibrated: bool = False
    class_attention: bool = False
    before: Shape | None = None
    after: Shape | None = None
    layers: tuple[int, ...] = ()
    operators: tuple[Step, ...] = ()
    exactness: str = ""
    parameters_before: Mapping[str, int] = field(default_factory=dict)
    parameters_after: Mapping[str, int] = field(default_factory=dict)
    saved_by: Mapping[str, int] = field(default_factory=dict)
    flops_before: JsonObject | None = None
    flops_after: JsonObject | None = None
    flops_saved_by: JsonObject | None = None

    @classmethod
    def from_dict(cls, data: Json) -> Self:
        """Raises `DamagedRecord`."""
        take = Taker(data, "plan")
        policy = take.data.get("head_policy")  # a size is a word or a number
        strict = {
            "head_policy": text(policy) or take("head_policy", str if isinstance(policy, str) else int, ""),
            "seed": take("seed", int),
            "method": take("method", dict, {}),
            "class_attention": take("class_attention", bool, False),
            "before": take.part("before", shape_of),
            "after": take.part("after", shape_of),
            "layers": take.several("layers", int),
            "operators": tuple(map(Step.from_dict, take.several("operators", dict))),
        }
        return replace(cls.within(take.data), **strict).as_read(data)

    def __bool__(self) -> bool:
        """Whether anything is known of the plan."""
        return bool(self.as_dict())

    @property
    def required(self) -> frozenset[str]:
        """A plan says all of itself."""
        return frozenset(self.__dataclass_fields__) - {"inferred"} if self.before is not None else frozenset()


def shape_of(data: Json) -> Shape:
    """Raises `DamagedRecord`."""
    try:
        return Shape.from_dict(data)  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError, AttributeError, LeanSurgeonError) as error:
        raise DamagedRecord(f"{NAME} is damaged: a shape in it cannot be read ({type(error).__name__}).") from None
