"""The three parts of sample data, which have no sample in common: what is fitted, what guards, what judges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
U = TypeVar("U")

RANDOM = "random tokens"  # as records name data that nobody named
WORDS = {"fit": "fit", "guard": "guard", "heldout": "judge"}  # what samples of a part are there to do


class Parts(NamedTuple, Generic[T]):
    """One of a kind for each part: numbers of samples, rows of a data set, batches."""

    fit: T
    guard: T
    heldout: T

    def each(self, make: Callable[[str, T], U]) -> Parts[U]:
        """What `make` makes of the name and the content of every part, in their order."""
        return Parts(*map(make, self._fields, self))


def told(counts: Parts[int]) -> str:
    """How many samples do what, such as "512 to fit, 128 to guard, 512 to judge"."""
    return ", ".join(f"{count} to {WORDS[part]}" for part, count in counts._asdict().items())
