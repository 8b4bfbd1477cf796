"""Search for the best (heads, layers, MLP) of a source under a budget, in four stages that each look at fewer shapes
for longer.

    space      every shape that the source can be cut to with few enough parameters, counted exactly
    cheap      parameters, FLOPs, memory, latency, and measurements of the layers from one pass over sample data
    halving    short heals (`heals`) or short trainings (`trainings`) of the best few, the better half for twice as long
    outcome    the winner next to its control and the source, the Pareto front, and how the order changed on the way

`search` is the entry point. All expensive results are saved in the search's folder, and the same call resumes there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import LeanSurgeonError, UsageError
from leansurgeon.progress import Say, silent
from leansurgeon.reading import jsonfile
from leansurgeon.search import cheap, limits
from leansurgeon.search.cheap import CheapScores
from leansurgeon.search.halving import Results, Rung, Score, climb, order_candidates, schedule
from leansurgeon.search.limits import Limit
from leansurgeon.search.space import Budget, Candidate, Shapes, control
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.training.processes.signals import raising
from leansurgeon.training.runs.folder import write_json

if TYPE_CHECKING:
    from leansurgeon.measure.costs.memory import Setting
    from leansurgeon.search.evidence import Evidence
    from leansurgeon.search.heals import HealTrial
    from leansurgeon.search.trainings import Trainings

STOPPED = "Stopped by a signal. What was finished is kept; run the same command again."
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
    setting: Setting,
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
    controls: dict[str, Candidate] = {}
    control_names: dict[str, str] = {}

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
    setting: Setting,
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
        size = Limit(budget.memory or 0, lambda c: limits.training_memory(source, c.shape, setting))
        time = Limit(budget.latency or 0, lambda c: limits.latency(source, c.shape, setting.tokens))
        asked = {name: limit for name, limit in (("memory", size), ("latency", time)) if limit.most}
        for name in asked:
            say(f"Looking for shapes that keep the limit of {name} ...")
        picked = limits.pick(ranked, tries, cheap.old_heads(tries), list(asked.values()))
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
    source: Source, candidates: Sequence[Candidate], numbers: dict[str, CheapScores], setting: Setting
) -> tuple[dict[str, CheapScores], str]:
    """Add the predicted memory of these candidates; the text describes its setting, or why there is none."""
    predicted = dict(numbers)
    try:
        for candidate in candidates:
            if (cheaply := predicted[candidate.name]).memory is None:
                memory = limits.training_memory(source, candidate.shape, setting)
                predicted[candidate.name] = replace(cheaply, memory=memory)
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
