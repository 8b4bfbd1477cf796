"""Durations with units: `30ep` epochs, `5000st` optimizer steps; `24h`, `1h30`, `5 minutes`, `90s` of time.
No torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator

_PART = r"(\d+(?:\.\d+)?)\s*([a-z]*)"
_UNITS = {
    "ep": ("ep", "epoch", "epochs"),
    "st": ("st", "step", "steps"),
    "h": ("h", "hr", "hrs", "hour", "hours"),
    "m": ("m", "min", "mins", "minute", "minutes"),
    "s": ("s", "sec", "secs", "second", "seconds"),
}
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0}


@dataclass(frozen=True)
class Duration:
    """A length of training with its unit."""

    value: float
    unit: Literal["ep", "st", "h", "m", "s"]

    @property
    def seconds(self) -> float | None:
        """Return wall-clock seconds; None for a length in epochs or steps."""
        return self.value * _SECONDS[self.unit] if self.unit in _SECONDS else None

    def steps(self, steps_per_epoch: int) -> int:
        """Return a length in epochs or steps as optimizer steps, at least 1."""
        if self.seconds:
            raise ValueError(f"{self.value:g}{self.unit} is a time and no number of steps")
        return max(1, round(self.value * (steps_per_epoch if self.unit == "ep" else 1)))


def parse_duration(text: str) -> Duration:
    """Parse `"30ep"`, `"5000st"`, `"24h"` or `"1h30"` into a `Duration`. Raises `ValueError` that lists the spellings.

    >>> parse_duration("1h30"), parse_duration("5 minutes")
    (Duration(value=5400.0, unit='s'), Duration(value=5.0, unit='m'))
    """
    words, clock = str(text).strip().lower(), list(_SECONDS)
    parts = re.findall(_PART, words) if re.fullmatch(rf"(?:{_PART}\s*)+", words) else []
    units = [next((unit for unit, known in _UNITS.items() if word in known), "") for _, word in parts]
    if len(units) > 1 and not parts[-1][1]:  # 1h30: a number after hours means minutes
        units[-1] = dict(pairwise(clock)).get(units[-2], "")
    in_order = units == [unit for unit in clock if unit in units] if len(units) > 1 else "".join(units)
    values = [float(number) for number, _ in parts]
    if not in_order or sum(values) <= 0:
        raise ValueError(
            "a duration has a unit, as in 30ep (epochs) or 5000st (steps) or 24h, 1h30, 30m, 90s (time), "
            f"and {text!r} is none"
        )
    if units == ["st"] and not values[0].is_integer():
        raise ValueError(f"steps are whole numbers, and {text!r} is none")
    if len(units) == 1:
        return Duration(values[0], units[0])
    return Duration(sum(value * _SECONDS[unit] for value, unit in zip(values, units, strict=True)), "s")


def clock_seconds(text: str) -> float | None:
    """Return the seconds of a length in time, such as `90s`, `5m` or `1h`; None for any other text."""
    try:
        return parse_duration(text).seconds
    except ValueError:
        return None


def _duration_text(given: Any) -> str:
    parse_duration(given)
    return str(given).strip()


def _fraction_or_length(given: Any) -> float | str:
    if isinstance(given, str) and re.fullmatch(r"[\d.eE+-]+", given):
        given = float(given)
    if isinstance(given, str):
        return _duration_text(given)
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 <= given < 1:
        raise ValueError(f"warmup is a fraction below 1 (0.1) or has a unit (5ep, 500st), and {given!r} is neither")
    return float(given)


def _check_counted(given: str) -> str:
    if parse_duration(given).seconds:
        raise ValueError(f"this comes every so many epochs (50ep) or steps (500st), and {given!r} is a time")
    return given


DurationText = Annotated[str, BeforeValidator(_duration_text)]
Counted = Annotated[DurationText, AfterValidator(_check_counted)]
Warmup = Annotated[float | str, BeforeValidator(_fraction_or_length)]
