"""Random numbers as a pure function of (seed, epoch, sample index): stateless, so independent of order and batch.

The generator is a counter passed through the finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014): one round over the sample's identity, one over the position. Vectorised over a batch.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Generator

import numpy as np
from numpy import ndarray

_LOCK = threading.Lock()
_LIBRARIES = 11  # stream of the numbers that seed other libraries
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 1 << 13  # 64-bit numbers processed at once: 64 KiB
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def uniform(seed: int, epoch: int, indices_B: ndarray, count: int, *, stream: int = 0) -> ndarray:
    """Draw (B, count) float64 in [0, 1) for the samples `indices_B`; each `stream` gives independent numbers."""
    keys_B1 = _keys(seed, epoch, indices_B, stream)[:, None]
    bits_BN = _mix(keys_B1 + np.arange(1, count + 1, dtype=np.uint64)[None] * _GOLDEN)
    return (bits_BN >> np.uint64(11)) * 2.0**-53


def words(seed: int, epoch: int, indices_B: ndarray, count: int, *, stream: int = 0) -> ndarray:
    """Draw (B, count) uint32 uniformly: several times faster than `uniform`, for every token of a text.

    Two come from one 64-bit number, made in blocks that fit the processor's cache.
    """
    keys_B1 = _keys(seed, epoch, indices_B, stream)[:, None]
    half = -(-count // 2)
    places_N = np.arange(1, half + 1, dtype=np.uint64) * _GOLDEN
    bits_BN = np.empty((len(keys_B1), half), dtype=np.uint64)
    rows = max(1, _BLOCK // half)
    for first in range(0, len(bits_BN), rows):
        some = slice(first, first + rows)
        bits_BN[some] = _mix(keys_B1[some] + places_N)
    return bits_BN.view(np.uint32)[:, :count]


def integers(seed: int, epoch: int, indices_B: ndarray, count: int, low: int, high: int, *, stream: int = 0) -> ndarray:
    """Draw (B, count) int64 in [low, high), each equally likely to within 2**-53."""
    return low + (uniform(seed, epoch, indices_B, count, stream=stream) * (high - low)).astype(np.int64)


def seed_each(seed: int, epoch: int, indices_B: ndarray) -> Generator[int, None, None]:
    """Yield the positions 0 .. B - 1 of a batch, with global generators seeded for each by (seed, epoch, sample index).

    Those are the generators of Python, numpy and torch, from which transforms of timm and torchvision draw. Their
    states are restored at the end, so nobody else's draws change. Threads of one process take turns.
    """
    import torch

    keys_B = integers(seed, epoch, indices_B, 1, 0, 1 << 32, stream=_LIBRARIES)[:, 0].tolist()
    cpu = torch.default_generator
    with _LOCK:
        states = random.getstate(), np.random.get_state(), cpu.get_state()
        try:
            for place, key in enumerate(keys_B):
                random.seed(key)
                np.random.seed(key)
                cpu.manual_seed(key)
                yield place
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            cpu.set_state(states[2])


def _keys(seed: int, epoch: int, indices_B: ndarray, stream: int) -> ndarray:
    """Return (B,) uint64 keys that determine the numbers of each sample."""
    key = mix_number(seed % 2**64)
    for word in (epoch, stream):
        key = mix_number(key ^ word)
    return _mix(np.uint64(key) + np.asarray(indices_B, dtype=np.uint64) * _GOLDEN)


def mix_number(z: int) -> int:
    """Compute `_mix` of one number, without the overhead of numpy."""
    z = (z + int(_GOLDEN)) % 2**64
    z = (z ^ z >> 30) * int(_MIX_1) % 2**64
    z = (z ^ z >> 27) * int(_MIX_2) % 2**64
    return z ^ z >> 31


def _mix(z: ndarray) -> ndarray:
    z = z + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))
