"""Select samples from batches, spread over all of them: batches of sentences are sorted by length and folders of images
by class, so the first ones are not representative. Imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Batch = dict[str, Tensor]
PIECES = 4  # minimum pieces of the guard, on which sets of layers are judged one after the other


def rows_of(batch: Batch) -> int:
    """Return the number of samples in a batch."""
    return len(next(value for value in batch.values() if isinstance(value, Tensor) and value.dim()))


def some_rows(batch: Batch, chosen: slice | np.ndarray) -> Batch:
    """Return some samples of a batch, by a slice or by their numbers."""
    size = rows_of(batch)
    return {k: v[chosen] if isinstance(v, Tensor) and v.dim() and len(v) == size else v for k, v in batch.items()}


def on(batch: Batch, device: torch.device) -> Batch:
    """Move a batch to a device."""
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}


def first_rows(batch: Batch, most: int, device: torch.device) -> Batch:
    """Return at most `most` samples of a batch, on `device`."""
    return on(some_rows(batch, slice(most)), device)


def pick(batches: Sequence[Batch], chosen: np.ndarray) -> list[Batch]:
    """Return the samples `chosen` (numbers through all batches), in their batches."""
    parts, start = [], 0
    for batch in batches:
        size = rows_of(batch)
        here = chosen[(chosen >= start) & (chosen < start + size)] - start
        if len(here):
            parts.append(some_rows(batch, here))
        start += size
    return parts


def thin(batches: Sequence[Batch], most: int | None) -> list[Batch]:
    """Return at most `most` samples, evenly spread from the first to the last."""
    total = sum(map(rows_of, batches))
    if most is None or most >= total:
        return list(batches)
    return pick(batches, np.unique(np.linspace(0, total - 1, most).round().astype(int)))


def inner(total: int, number: int) -> np.ndarray:
    """Return the positions of `number` of `total` items (all, if there are fewer): the middles of as many equal parts.

    >>> inner(10, 2)
    array([2, 7])
    """
    number = min(total, number)
    return (2 * np.arange(number) + 1) * total // (2 * number)


def tokens_of(batch: Batch) -> int:
    """Return the tokens of a batch; an image counts as its patches of 16 x 16 pixels, but at least 64."""
    if "input_ids" in batch:
        return batch["input_ids"].numel()
    sides = [value.shape[-1] for value in batch.values() if isinstance(value, Tensor) and value.dim() > 3]
    return rows_of(batch) * max(64, (max(sides, default=0) // 16) ** 2)


def in_pieces(batches: list[Batch]) -> list[Batch]:
    """Split the samples of some batches into at least PIECES batches, if there are enough samples. Adjacent samples may
    be alike, so every piece takes samples from all over its batch.
    """
    each = -(-PIECES // len(batches))
    pieces = []
    for batch in batches:
        rows = np.arange(rows_of(batch))
        whole = any(isinstance(v, Tensor) and v.dim() and len(v) != len(rows) for v in batch.values())
        pieces += [batch] if whole else [some_rows(batch, rows[i::each]) for i in range(min(each, len(rows)))]
    return pieces


def some(batches: list[Batch], tokens: int | None) -> list[Batch]:
    """Return evenly spaced batches (sentences are sorted by length) that hold about this many tokens (`tokens_of`)."""
    sizes = [tokens_of(b) for b in batches]
    if tokens is None or tokens >= sum(sizes):
        return list(batches)
    return [batches[i] for i in inner(len(batches), max(1, round(len(batches) * tokens / sum(sizes))))]
