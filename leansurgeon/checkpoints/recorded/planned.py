"""The plan as it was carried out: all that stands under `plan` in surgery.json.

Shapes, kept layers, operators, and how heads were made decide what a model is taken for (`undo`, `diff`, a teacher), so
odd ones are damage; all else is shown, and odd values of it are None or empty (`Recorded`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from leansurgeon.checkpoints.recorded.part import Recorded
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.reading.values import text
from leansurgeon.shape import Shape


@dataclass(frozen=True)
class Step(Recorded):
    """One operator. `exactness`: "exact" leaves the function of what it touches unchanged, "near" approximates it,
    "fresh" forgets it.
    """

    WHERE = "operators"
    SURE = ("name", "exactness", "settings")
    required = ("settings",)

    name: str
    exactness: str
    says: str
    settings: JsonObject = field(default_factory=dict)


@dataclass(frozen=True)
class PlanRecord(Recorded):
    """A plan: what is kept of which source, by which operators, and what that saves. `layers` are those of the source
    that are kept; `inferred` is what was found of a family that nobody declared; `method` has its settings by name.
    """

    WHERE = "plan"
    SURE = ("head_policy", "seed", "method", "class_attention", "before", "after", "layers", "operators")

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

    def __post_init__(self) -> None:
        if isinstance(self.head_policy, str):  # a size is a word or a number
            object.__setattr__(self, "head_policy", text(self.head_policy))

    def __bool__(self) -> bool:
        """Whether anything is known of the plan."""
        return bool(self.as_dict())

    @property
    def required(self) -> Collection[str]:
        """A plan says all of itself."""
        return set(self.__dataclass_fields__) - {"inferred"} if self.before is not None else ()
