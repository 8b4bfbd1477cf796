"""Token sequences of different lengths: stored end to end beside their starts, handed out as padded rectangles."""

from __future__ import annotations

import numpy as np


def starts_of(lengths: np.ndarray) -> np.ndarray:
    """(N + 1,) int64: sequence i is flat[starts[i] : starts[i + 1]]."""
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def padded(
    flat: np.ndarray, starts: np.ndarray, indices_B: np.ndarray, width: int, pad: int, *, left: bool = False
) -> np.ndarray:
    """(B, width) int64 rows of the sequences `indices_B`, each filled up with `pad` behind it or to its `left`, none
    longer than width.
    """
    rows_BT = np.full((len(indices_B), width), pad, dtype=np.int64)
    for row, index in zip(rows_BT, indices_B, strict=True):
        sequence = flat[starts[index] : starts[index + 1]]
        row[width - len(sequence) if left else 0 :][: len(sequence)] = sequence
    return rows_BT


def lengths_of(starts: np.ndarray, indices_B: np.ndarray) -> np.ndarray:
    """(B,) int64 lengths of these sequences."""
    return np.asarray(starts[indices_B + 1] - starts[indices_B])
