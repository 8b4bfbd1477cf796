"""Worker processes that generate the chunks of a data set in parallel.

A chunk depends only on its number, so the number of processes affects the time alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from leansurgeon.errors import LeanSurgeonError

Chunk = TypeVar("Chunk")


@dataclass(frozen=True)
class _Chunks:
    """A data set as torch's loader takes it: chunk i of `make`."""

    make: Callable[..., Any]
    given: tuple[Any, ...]

    def __getitem__(self, number: int) -> Any:
        return self.make(*self.given, number)


def chunks(make: Callable[..., Chunk], given: tuple[Any, ...], workers: int) -> Iterator[Chunk]:
    """Yield chunks 0, 1, 2, ... without end, each `make(*given, number)`, made here or by `workers` processes in turn.

    Raises `LeanSurgeonError` if a process ends early.
    """
    from torch import Generator
    from torch.utils.data import DataLoader

    loader = DataLoader(
        _Chunks(make, given),
        batch_size=None,
        sampler=itertools.count(),
        num_workers=workers if workers > 1 else 0,
        collate_fn=lambda chunk: chunk,
        generator=Generator(),  # torch's own is left alone
        multiprocessing_context="fork" if workers > 1 else None,
    )
    try:
        yield from loader
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise LeanSurgeonError(f"A process that makes data ended early: {error}.") from None
