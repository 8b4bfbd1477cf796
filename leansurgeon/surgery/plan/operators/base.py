"""What every operator of surgery says of itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from leansurgeon.reading.jsonfile import JsonObject

Exactness = Literal["exact", "near", "fresh"]


@dataclass(frozen=True)
class Operator:
    """One step of a plan. `exactness`: `exact` leaves the function of what it touches unchanged, `near` approximates
    it, `fresh` forgets it.
    """

    name: str
    exactness: Exactness
    says: str
    settings: dict[str, Any] = field(default_factory=dict)

    def in_stage(self, number: int) -> Operator:
        """The same step, said of one stage of several (counted from 1)."""
        return replace(self, says=f"stage {number}: {self.says}", settings={"stage": number, **self.settings})

    def as_dict(self) -> JsonObject:
        """The step as `surgery.json` holds it."""
        return asdict(self)
