"""Start afresh: new values by the library's own rule, a pure function of (seed, tensor name)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from math import prod

import numpy as np

from leansurgeon.checkpoints.recorded.planned import Step
from leansurgeon.shape import Stage

PIECE = 1 << 18  # values (1 MiB)


def normal(shape: tuple[int, ...], std: float, seed: int, name: str) -> np.ndarray:
    """N(0, std) in float32; every tensor has its own stream, so the order of writing does not matter."""
    return next(pieces(shape[0], shape[1:], std, seed, name, shape[0]))


def pieces(
    rows: int, sizes: tuple[int, ...], std: float, seed: int, name: str, at_once: int | None = None
) -> Iterator[np.ndarray]:
    """The same values, `at_once` rows of `sizes` at a time (by default what fits in a cache)."""
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = np.random.Generator(np.random.SFC64(np.random.SeedSequence(list(key[:16]))))
    at_once = at_once or max(1, PIECE // prod(sizes))
    for start in range(0, rows, at_once):
        values = generator.standard_normal((min(at_once, rows - start), *sizes), dtype=np.float32)
        values *= np.float32(std)
        yield values


def attention_operator(before: Stage, after: Stage) -> Step:
    """The step that starts q, k and v anew."""
    return Step(
        "fresh-attention",
        "fresh",
        f"start q, k, v afresh: {before.heads} heads of {before.head_dim} cannot become "
        f"{after.heads} of {after.head_dim} by copying",
        {"before": [before.heads, before.head_dim], "after": [after.heads, after.head_dim]},
    )


def model_operator(preset: bool) -> Step:
    """The step that starts the whole model anew."""
    says = "the preset has no weights" if preset else "nothing of the source's weights is kept"
    return Step("fresh", "fresh", f"initialise the whole model by the library's own rules; {says}")
