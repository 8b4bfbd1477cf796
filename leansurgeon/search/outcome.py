"""Search for the best (heads, layers, MLP) of a source under a budget, in four stages that each look at fewer shapes
for longer.

    space      every shape that the source can be cut to with few enough parameters, counted exactly
    cheap      parameters, FLOPs, memory, latency, and measurements of the layers from one pass over sample data
    halving    short heals (`heals`) or short trainings (`trainings`) of the best few, the better half for twice as long
    outcome    the winner next to its control and the source, the Pareto front, and how the order changed on the way

`search` is the entry point. All expensive results are saved in the search's folder, and the same call resumes there.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from leansurgeon.architectures.base import Architecture, Config
from leansurgeon.checkpoints.reshaped import Reshaped
from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import LeanSurgeonError, UsageError
from leansurgeon.measure.costs import memory
from leansurgeon.measure.data import inputs
from leansurgeon.progress import Say, silent
from leansurgeon.reading import jsonfile
from leansurgeon.search import cheap
from leansurgeon.search.cheap import CheapScores
from leansurgeon.search.halving import Results, Rung, Score, climb, order_candidates, schedule
from leansurgeon.search.space import Budget, Candidate, Shapes, control
from leansurgeon.shape import Shape, evenly_per_stage
from leansurgeon.surgery.requested_shape import RequestedShape, holder
from leansurgeon.training.processes.signals import raising
from leansurgeon.training.runs.folder import write_json

if TYPE_CHECKING:
    from leansurgeon.search.evidence import Evidence
    from leansurgeon.search.heals import HealTrial
    from leansurgeon.search.trainings import Trainings

STOPPED = "Stopped by a signal. What was finished is kept; run the same command again."
WARM_UP, LEAST, SECONDS = 3, 10, 0.3  # passes before a latency is timed, and minimum passes and seconds of timing
CHOSEN = "chosen.json"  # which are tried: measured latencies vary, and a resumed search must not change its candidates


@dataclass(frozen=True)
class SearchOutcome:
    """Result of a search. `tried` is in the order of the cheap scores; `rungs` hold the results by name, the last one
    also those of the winner's `controls` and of the source (`original`). `untouched` are scores on samples that were
    not used to choose.
    """

    source: Source
    budget: Budget
    space: Shapes
    cheap: dict[str, CheapScores]
    tried: tuple[Candidate, ...]
    controls: tuple[Candidate, ...]
    original: Candidate
    rungs: list[Results]
    schedule: list[Rung]
    control_names: dict[str, str] = field(default_factory=dict)  # candidate -> its control
    says: str = ""
    untouched: dict[str, Score] = field(default_factory=dict)

    @property
    def everyone(self) -> dict[str, Candidate]:
        """Candidates and controls that were tried, by name."""
        return {c.name: c for c in (*self.tried, *self.controls)}

    @property
    def finalists(self) -> list[Candidate]:
        """Candidates of the last rung, the best first, without the source."""
        last = self.rungs[-1]
        return order_candidates([c for c in self.everyone.values() if c.name in last], last)

    @property
    def winner(self) -> Candidate:
        """The best of the last rung."""
        return self.finalists[0]

    @property
    def control(self) -> Candidate | None:
        """The winner's control; None if it has the old heads itself."""
        return self.everyone.get(self.control_names.get(self.winner.name, ""))

    def scores(self, name: str) -> list[Score]:
        """Return the scores of a candidate, rung by rung; a control only has that of the last rung."""
        scores = [rung[name].score for rung in self.rungs if name in rung]
        return [score for score in scores if score is not None]


@raising(STOPPED)
def search(
    source: Source,
    space: Shapes,
    budget: Budget,
    evidence: Evidence | None,
    bench: HealTrial | Trainings,
    folder: Path,
    *,
    setting: memory.Setting,
    tries: int = 8,
    say: Say = silent,
) -> SearchOutcome:
    """Choose among the candidates of `space` and try them on `bench`. `evidence` holds the measurements of the source's
    layers.

    Raises `UsageError` if nothing keeps the budget, `Stopped` at SIGTERM, and what heals and trainings raise.
    """
    numbers = cheap.scores(source, space.candidates, evidence)
    ranked = cheap.order(space.candidates, numbers)
    tried, numbers = who_is_tried(source, ranked, numbers, budget, folder, setting, tries, say)
    init = tried[0].wanted.init
    original = Candidate(RequestedShape(init=init), source.shape, source.parameters.total)
    controls = {}
    control_names = {}

    def beside(survivors: Sequence[Candidate]) -> list[Candidate]:
        """Return the controls of the survivors, unless they are candidates themselves, and the source."""
        for survivor in survivors:
            other = control(source, survivor, calibrated=init != "fresh")
            if other:
                control_names[survivor.name] = other.name
            if other and other.name not in {c.name for c in survivors}:
                controls[other.name] = other
        return [*controls.values(), original]

    rungs = climb(tried, bench.attempt, beside=beside, say=say)
    late = [c for c in (*controls.values(), original) if c.name not in numbers]
    numbers |= cheap.scores(source, late, evidence)
    numbers, says = with_memory(source, [*tried, *controls.values(), original], numbers, setting)
    outcome = SearchOutcome(
        source=source,
        budget=budget,
        space=space,
        cheap=numbers,
        tried=tuple(tried),
        controls=tuple(controls.values()),
        original=original,
        rungs=rungs,
        schedule=schedule(len(tried)),
        control_names=control_names,
        says=says,
    )
    if not hasattr(bench, "score_held_out"):
        return outcome
    judged = [c for c in (outcome.winner, outcome.control, original) if c]
    scores = {c.name: score for c in judged if (score := bench.score_held_out(c)) is not None}
    return replace(outcome, untouched=scores)


def who_is_tried(
    source: Source,
    ranked: Sequence[Candidate],
    numbers: dict[str, CheapScores],
    budget: Budget,
    folder: Path,
    setting: memory.Setting,
    tries: int,
    say: Say,
) -> tuple[list[Candidate], dict[str, CheapScores]]:
    """Return the candidates that keep the limits, with their measurements, from the folder if chosen by an earlier
    call.
    """
    by_name = {c.name: c for c in ranked}
    file = folder / CHOSEN
    try:
        known = jsonfile.read_object(file)
    except UsageError:
        size = Limit(budget.memory or 0, lambda c: training_memory(source, c.shape, setting))
        time = Limit(budget.latency or 0, lambda c: latency(source, c.shape, setting.tokens))
        asked = {name: limit for name, limit in (("memory", size), ("latency", time)) if limit.most}
        for name in asked:
            say(f"Looking for shapes that keep the limit of {name} ...")
        picked = pick(ranked, tries, cheap.old_heads(tries), list(asked.values()))
        if not picked:
            raise nothing_fits(len(ranked), size, time) from None
        known = {"names": [c.name for c in picked], "memory": size.known, "latency": time.known}
        folder.mkdir(parents=True, exist_ok=True)
        write_json(file, known)
    measured = dict(numbers)
    for name in known["names"]:
        measured[name] = replace(measured[name], memory=known["memory"].get(name), latency=known["latency"].get(name))
    return [by_name[name] for name in known["names"]], measured


def with_memory(
    source: Source, candidates: Sequence[Candidate], numbers: dict[str, CheapScores], setting: memory.Setting
) -> tuple[dict[str, CheapScores], str]:
    """Add the predicted memory of these candidates; the text describes its setting, or why there is none."""
    predicted = dict(numbers)
    try:
        for candidate in candidates:
            if (cheaply := predicted[candidate.name]).memory is None:
                peak = training_memory(source, candidate.shape, setting)
                predicted[candidate.name] = replace(cheaply, memory=peak)
    except LeanSurgeonError as error:
        return numbers, f"No memory: {error.message}"
    trained = f"batch {setting.batch}, {setting.precision}, {setting.optimizer}"
    return predicted, f"memory: predicted peak on a CUDA GPU, {trained}."


def nothing_fits(count: int, size: Limit, time: Limit) -> UsageError:
    """Return the error for limits that no shape keeps, with the smallest value seen."""
    for limit, flag, unit, scale in ((size, "--memory", "GB", 1e9), (time, "--latency", "ms", 1.0)):
        if limit.known and min(limit.known.values()) > limit.most:
            least = min(limit.known.values()) / scale
            return UsageError(
                f"None of {count} shapes keeps {flag} {limit.most / scale:g} {unit}; the smallest one measured needs "
                f"{least:.3g} {unit}.",
                "Allow more, or name smaller shapes with --layers, --heads and --mlp-dim.",
            )
    return UsageError(f"None of {count} shapes keeps both --memory and --latency.", "Allow more.")


# -- limits ----------------------------------------------------------------------------------------


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
    taken = []
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
