"""Memory and latency of a shape, and which shapes fit. Torch is imported only when a model is built."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from leansurgeon.architectures.base import Architecture, Config
from leansurgeon.checkpoints.reshaped import Reshaped
from leansurgeon.checkpoints.source import Source
from leansurgeon.measure.costs import memory
from leansurgeon.measure.data import inputs
from leansurgeon.search.space import Candidate
from leansurgeon.shape import Shape, evenly_per_stage
from leansurgeon.surgery.requested_shape import holder

WARM_UP, LEAST, SECONDS = 3, 10, 0.3  # warm-up passes, and minimum passes and seconds of timing


def config_of(source: Source, shape: Shape) -> tuple[Config, Architecture]:
    """Return config and family of the source at another shape, with evenly spaced layers kept."""
    family = holder(source.architecture, source.shape, shape)
    kept = evenly_per_stage(source.shape, shape, source.architecture.period)
    return Reshaped(source, family, shape).config(kept), family


def training_memory(source: Source, shape: Shape, setting: memory.Setting) -> int:
    """Return the predicted peak bytes of training on one GPU. Raises what `measure.costs.memory.predict` raises."""
    return memory.predict(*config_of(source, shape), setting).total


def latency(source: Source, shape: Shape, tokens: int | None = None) -> float:
    """Return the median milliseconds of a forward pass of one sample, on the GPU if there is one, in fp32 without
    autocast; weights are random, since time does not depend on them. `tokens` is the length of a text sample.
    """
    import torch

    from leansurgeon.checkpoints.model import initialise
    from leansurgeon.measure.costs.speed import time_work

    config, family = config_of(source, shape)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = initialise(config, family, 0).eval().to(device)
    batch = inputs.make(config, family, 1, inputs.sample_tokens(tokens, config, family), device)
    taken: list[float] = []
    with torch.no_grad():
        for _ in range(WARM_UP):
            inputs.run(model, batch)
        while len(taken) < LEAST or sum(taken) < SECONDS:
            taken.append(time_work(lambda: inputs.run(model, batch), device))
    return 1000 * statistics.median(taken)


@dataclass
class Limit:
    """Check candidates against a limit with as few measurements as possible: a shape that is at least as large
    everywhere as one that failed fails, too.
    """

    most: float
    measure: Callable[[Candidate], float]
    known: dict[str, float] = field(default_factory=dict)
    too_much: list[Candidate] = field(default_factory=list)

    def fits(self, candidate: Candidate) -> bool:
        """Return whether a candidate keeps the limit; measures it only if no smaller shape has failed."""
        if any(covers(candidate.shape, other.shape) for other in self.too_much):
            return False
        value = self.known.get(candidate.name)
        if value is None:
            value = self.known[candidate.name] = self.measure(candidate)
        if value > self.most:
            self.too_much.append(candidate)
        return value <= self.most


def covers(large: Shape, small: Shape) -> bool:
    """Return whether every number of one shape is at least that of the other."""
    keys = ("depth", "inner", "mlp_dim")
    pairs = list(zip(large.stages, small.stages, strict=True))
    return all(getattr(a, key) >= getattr(b, key) for a, b in pairs for key in keys)


def pick(ordered: Sequence[Candidate], tries: int, old_heads: int, limits: Sequence[Limit]) -> list[Candidate]:
    """Return the first `tries` of `ordered` that keep all limits, with the first `old_heads` of those with the old
    number of heads among them, if there are that many.
    """

    def first(candidates: list[Candidate], count: int) -> set[str]:
        fitting = (candidate.name for candidate in candidates if all(limit.fits(candidate) for limit in limits))
        return set(islice(fitting, count))

    names = first([c for c in ordered if not c.more_heads], old_heads)
    names |= first([c for c in ordered if c.name not in names], tries - len(names))
    return [c for c in ordered if c.name in names]
