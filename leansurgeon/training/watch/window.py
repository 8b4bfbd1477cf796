"""The steps whose losses nobody has read yet: reading makes the host wait for the device, so it comes in windows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class Look(NamedTuple):
    """What a look brings: rows of loss sum, count and gradient norm, one a step; how many of these steps this process
    has taken (others came with a checkpoint), in how many seconds, and for how many of them it waited for data.
    """

    rows: list[list[float]]
    steps: int
    seconds: float
    waited: float

    @property
    def waiting(self) -> float:
        """The share of the time that went by without data."""
        return self.waited / max(self.seconds, 1e-9)


@dataclass
class Window:
    """Steps since the last look, on the device, and the clock beside them."""

    rows: list[torch.Tensor] = field(default_factory=list)
    _began: float = 0.0
    _waited: float = 0.0
    _taken: int = 0

    def begin(self) -> None:
        """Start the clock; rows that a checkpoint brought stay, and are not counted as taken here."""
        self._began, self._waited, self._taken = time.perf_counter(), 0.0, 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What is done inside is waiting for data."""
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done inside is no part of any step. The clock is not reset: this may come between two looks."""
        start = time.perf_counter()
        yield
        self._began += time.perf_counter() - start

    def add(self, row: torch.Tensor) -> None:
        """A step: loss sum, count and gradient norm, `(3,)`, still on the device."""
        self.rows.append(row)
        self._taken += 1

    def values(self) -> list[list[float]]:
        """The rows as numbers, which stay where they are: for a checkpoint."""
        return torch.stack(self.rows).tolist() if self.rows else []

    def look(self) -> Look:
        """Read all rows (the one place where the host waits for the device) and begin anew."""
        rows, now = torch.stack(self.rows).tolist(), time.perf_counter()
        look = Look(rows, self._taken, now - self._began, self._waited)
        self.rows, self._began, self._waited, self._taken = [], now, 0.0, 0
        return look
