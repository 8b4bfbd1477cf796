"""Format numbers for a person."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, stdev

NONE = "–"


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (None with one value) of a quantity over `n` seeds."""

    mean: float
    sd: float | None
    n: int

    @property
    def error(self) -> float:
        """Standard error of the mean; 0 with one value, where it is unknown."""
        return (self.sd or 0.0) / math.sqrt(self.n)


def spread(values: Iterable[float | None]) -> Spread | None:
    """Return the spread of the known values, or None without any."""
    known = [v for v in values if v is not None]
    return Spread(fmean(known), stdev(known) if len(known) > 1 else None, len(known)) if known else None


def count(value: float | None, *, short: bool = False) -> str:
    """Return `152,394`; with `short`, `119.6 M` from ten million on."""
    if value is None:
        return NONE
    if short and value >= 1e7:
        return f"{value / 1e9:,.2f} B" if value >= 1e9 else f"{value / 1e6:,.1f} M"
    return f"{value:,.0f}"


def change(value: float | None, reference: float | None) -> str:
    """Return `-49.6 %` relative to a reference; a dash if either is missing."""
    if value is None or not reference:
        return NONE
    return f"{100 * (value - reference) / reference:+.1f} %"


def memory(value: float | None) -> str:
    """Return `12.3 MiB`, `412 MiB`, `13.4 GiB`."""
    if value is None:
        return NONE
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1000 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if value >= 99.95 or unit == "B" else f"{value:.1f} {unit}"


def plain(value: float | None) -> str:
    """Return a number with as many digits as matter: `4.04`, `21.3`, `960`, `1,260`, `3.1e7`."""
    if value is None:
        return NONE
    size = abs(value)
    if size >= 99_999.5:
        return f"{value:.1e}".replace("e+0", "e").replace("e+", "e")
    return f"{value:.2f}" if size < 9.995 else f"{value:.1f}" if size < 99.95 else f"{value:,.0f}"


def plain_small(value: float) -> str:
    """Return three significant digits, also below 1: `0.00123`, `20`, `1,000`, `3.1e7`."""
    return plain(value) if abs(value) >= 1000 else f"{value:.3g}"


def seconds(value: float | None) -> str:
    """Return `24 s`, `3.5 min`, `2.1 h`."""
    if value is None:
        return NONE
    return f"{value:.0f} s" if value < 100 else f"{value / 60:.1f} min" if value < 6000 else f"{value / 3600:.1f} h"


def join_words(words: Iterable[str]) -> str:
    """Return `a`, `a and b`, `a, b and c`."""
    words = list(words)
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else ""
