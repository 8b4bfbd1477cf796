"""Two loops timed in turns, so that a noisy neighbour slows both: the ratio of their times, block by block."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


class Pair(NamedTuple):
    """Median and quartiles of (seconds of the first / seconds of the second), and the median seconds of a step."""

    ratio: float
    low: float
    high: float
    first: float
    second: float

    def __str__(self) -> str:
        return f"ratio {self.ratio:.3f} (quartiles {self.low:.3f} to {self.high:.3f})"


def seconds(loop: Iterator[Any], steps: int, device: torch.device) -> float:
    """Time of `steps` items: processor time of this process on a CPU, that of the clock on a GPU."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    start = clock()
    for _ in range(steps):
        next(loop)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def compare(
    first: Iterator[Any], second: Iterator[Any], *, block: int, blocks: int, warm_up: int, device: torch.device
) -> Pair:
    """Time both loops in turns: `blocks` blocks of `block` items each, after `warm_up` items; who begins alternates."""
    for loop in (first, second):
        seconds(loop, warm_up, device)
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(blocks):
        pair = [(first, times[0]), (second, times[1])]
        for loop, kept in pair if number % 2 else reversed(pair):
            kept.append(seconds(loop, block, device))
    ratios = [a / b for a, b in zip(*times, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    one, other = (statistics.median(kept) / block for kept in times)
    return Pair(statistics.median(ratios), low, high, one, other)
