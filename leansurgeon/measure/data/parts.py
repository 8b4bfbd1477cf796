"""The three parts of sample data, which have no sample in common: what is fitted, what guards, what judges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")

RANDOM = "random tokens"  # as records name data that nobody named
WORDS = {"fit": "fit", "guard": "guard", "heldout": "judge"}  # what samples of a part are there to do


@dataclass(frozen=True)
class Parts(Generic[T]):
    """One of a kind for each part: numbers of samples, rows of a data set, batches."""

    fit: T
    guard: T
    heldout: T

    def items(self) -> Iterator[tuple[str, T]]:
        """The parts by name, in their order."""
        return ((field.name, getattr(self, field.name)) for field in fields(self))

    def __iter__(self) -> Iterator[T]:
        return (content for _, content in self.items())

    def __getitem__(self, part: str) -> T:
        return getattr(self, part)

    def each(self, make: Callable[[str, T], U]) -> Parts[U]:
        """What `make` makes of the name and the content of every part, in their order."""
        return Parts(**{name: make(name, content) for name, content in self.items()})


def told(counts: Parts[int]) -> str:
    """How many samples do what, such as "512 to fit, 128 to guard, 512 to judge"."""
    return ", ".join(f"{count} to {WORDS[part]}" for part, count in counts.items())
