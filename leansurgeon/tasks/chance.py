"""Random numbers that are a pure function of (seed, epoch, sample index): no state, hence no order and no batch to
depend on.

The generator is a counter put through the finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014): one round over the sample's identity, one over the position. Vectorised over a whole
batch.
"""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 1 << 13  # numbers of 64 bits that are worked on at once: 64 KiB, twice
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def uniform(seed: int, epoch: int, indices_B: np.ndarray, count: int, *, stream: int = 0) -> np.ndarray:
    """(B, count) float64 in [0, 1) for the samples `indices_B`; another `stream` gives other numbers for the same
    samples.
    """
    keys_B1 = _keys(seed, epoch, indices_B, stream)[:, None]
    bits_BN = _mix(keys_B1 + np.arange(1, count + 1, dtype=np.uint64)[None] * _GOLDEN)
    return (bits_BN >> np.uint64(11)) * 2.0**-53


def words(seed: int, epoch: int, indices_B: np.ndarray, count: int, *, stream: int = 0) -> np.ndarray:
    """(B, count) uint32, uniform over all of them: several times faster than `uniform`, for every token of a text.

    Two come from one number of 64 bits, made in blocks that stay in the processor's cache.
    """
    keys_B1 = _keys(seed, epoch, indices_B, stream)[:, None]
    half = -(-count // 2)
    places_N = np.arange(1, half + 1, dtype=np.uint64) * _GOLDEN
    bits_BN = np.empty((len(keys_B1), half), dtype=np.uint64)
    rows = max(1, _BLOCK // half)
    spare = np.empty((rows, half), dtype=np.uint64)
    for first in range(0, len(bits_BN), rows):
        block = bits_BN[first : first + rows]
        np.add(keys_B1[first : first + rows], places_N, out=block)
        _mix_in_place(block, spare[: len(block)])
    return bits_BN.view(np.uint32)[:, :count]


def integers(
    seed: int, epoch: int, indices_B: np.ndarray, count: int, low: int, high: int, *, stream: int = 0
) -> np.ndarray:
    """(B, count) int64 in [low, high), each equally likely to within 2**-53."""
    return low + (uniform(seed, epoch, indices_B, count, stream=stream) * (high - low)).astype(np.int64)


def _keys(seed: int, epoch: int, indices_B: np.ndarray, stream: int) -> np.ndarray:
    """(B,) uint64: what the numbers of a sample follow from."""
    key = mix_number(seed % 2**64)
    for word in (epoch, stream):
        key = mix_number(key ^ word)
    return _mix(np.uint64(key) + np.asarray(indices_B, dtype=np.uint64) * _GOLDEN)


def mix_number(z: int) -> int:
    """`_mix` of one number, without numpy's cost of a call."""
    z = (z + int(_GOLDEN)) % 2**64
    z = (z ^ z >> 30) * int(_MIX_1) % 2**64
    z = (z ^ z >> 27) * int(_MIX_2) % 2**64
    return z ^ z >> 31


def _mix_in_place(z: np.ndarray, spare: np.ndarray) -> None:
    """`_mix` of z into z, with a second array of its shape to work in."""
    z += _GOLDEN
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        np.bitwise_xor(z, np.right_shift(z, np.uint64(shift), out=spare), out=z)
        z *= factor
    np.bitwise_xor(z, np.right_shift(z, np.uint64(31), out=spare), out=z)


def _mix(z: np.ndarray) -> np.ndarray:
    z = z + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))
