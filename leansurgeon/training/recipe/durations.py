"""Durations with units: `30ep` epochs, `5000st` optimizer steps; `24h`, `30m`, `90s` of time. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator

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
    """Parse `"30ep"`, `"5000st"`, `"24h"` or `"90s"` into a `Duration`. Raises `ValueError` that lists the spellings.

    >>> parse_duration("1.5h"), parse_duration("30ep")
    (Duration(value=1.5, unit='h'), Duration(value=30.0, unit='ep'))
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ep|st|h|m|s)", str(text).strip())
    if match is None or float(match[1]) <= 0:
        raise ValueError(
            "a duration has a unit, as in 30ep (epochs) or 5000st (steps) or 24h, 1.5h, 30m, 90s (time), "
            f"and {text!r} has none of these forms"
        )
    value, unit = float(match[1]), match[2]
    if unit == "st" and not value.is_integer():
        raise ValueError(f"steps are whole numbers, and {text!r} is not one")
    return Duration(value, unit)


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
    if isinstance(given, str):
        return _duration_text(given)
    if not isinstance(given, (int, float)) or not 0 <= given < 1:
        raise ValueError(f"warmup is a fraction below 1 (0.1) or has a unit (5ep, 500st), and {given!r} is neither")
    return float(given)


def _check_counted(given: str) -> str:
    if parse_duration(given).seconds:
        raise ValueError(f"this comes every so many epochs (50ep) or steps (500st), and {given!r} is a time")
    return given


DurationText = Annotated[str, BeforeValidator(_duration_text)]
Counted = Annotated[DurationText, AfterValidator(_check_counted)]
Warmup = Annotated[float | str, BeforeValidator(_fraction_or_length)]
