"""The order of training data as a pure function of (seed, epoch, step), the same for every number of processes.

Nothing here has a state, so nothing has to be saved: whoever knows the seed and the step knows the samples
(Accelerate's own loaders do not restore their order after a resume).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from leansurgeon.tasks.chance import mix_number

_ORDER, _DROPOUT, _MIXING = 1, 2, 3  # names of independent streams of random numbers


@lru_cache(maxsize=2)
def epoch_order(seed: int | None, epoch: int, size: int) -> np.ndarray:
    """All indices below `size`, shuffled: `(size,)` int64, read-only; the same on every machine. None for the seed
    leaves them as they are.
    """
    order = np.arange(size)
    if seed is not None:
        order = np.random.Generator(np.random.PCG64([_ORDER, seed, epoch])).permutation(size)
    order.setflags(write=False)
    return order


def global_batch(seed: int | None, step: int, size: int, batch: int) -> tuple[int, np.ndarray]:
    """Epoch and sample indices `(batch,)` of optimizer step `step` (from 0). An epoch's ragged tail is left out."""
    epoch, place = divmod(step, size // batch)
    return epoch, epoch_order(seed, epoch, size)[place * batch : (place + 1) * batch]


def groups(seed: int | None, position: int, samples: int, size: int, group: int) -> list[tuple[int, np.ndarray]]:
    """Epoch and sample indices `(group,)` of `samples` samples from `position` on, counted over all epochs.

    With group = samples = batch and position = step * batch this is `global_batch`.
    """
    per_epoch, parts = size // group * group, []
    for start in range(position, position + samples, group):
        epoch, place = divmod(start, per_epoch)
        parts.append((epoch, epoch_order(seed, epoch, size)[place : place + group]))
    return parts


def micro_batches(indices: np.ndarray, processes: int, rank: int, micro: int) -> np.ndarray:
    """The rows that process `rank` computes of one global batch: `(accumulation, micro)`.

    Over all ranks the rows are the global batch, each sample once, whatever the number of processes.
    """
    return indices.reshape(-1, processes, micro)[:, rank]


def eval_batches(size: int, batch: int, processes: int, rank: int) -> list[np.ndarray]:
    """The evaluation batches of process `rank`: consecutive samples, dealt in turn; the last batch may be shorter.

    The batches are the same for every number of processes, and together they hold each sample exactly once.
    """
    starts = range(0, size, batch)[rank::processes]
    return [np.arange(start, min(start + batch, size)) for start in starts]


def dropout_seed(seed: int, step: int, rank: int) -> int:
    """Seed of torch's generators for one optimizer step of one process: 64 bits, a pure function of its arguments."""
    return _mixed(_DROPOUT, seed, step, rank)


def mixing_seed(seed: int, epoch: int, step: int) -> int:
    """Seed of what is mixed how in one optimizer step, the same for all its micro batches and processes: 32 bits."""
    return _mixed(_MIXING, seed, epoch, step) >> 32


def _mixed(mixed: int, *numbers: int) -> int:
    for number in numbers:
        mixed = mix_number(mixed + number)
    return mixed
