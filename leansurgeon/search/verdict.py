"""What may be said of a search: the Pareto front, who is as good as the winner, how the order changed. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from math import hypot
from typing import Any

from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.search.outcome import Outcome
from leansurgeon.search.score import front, kendall_tau, moves
from leansurgeon.search.space import Candidate

FORETELL = ("parameters", "flops", "influence", "kappa")  # kappa is better small, the others large
TOLD = 3  # so many moves are named


@dataclass(frozen=True)
class Change:
    """Two stages, Kendall's tau of their orders, and the places that candidates moved up (down: negative)."""

    before: str
    after: str
    tau: float | None
    moves: dict[str, int]
    count: int


def stages(outcome: Outcome) -> list[tuple[str, dict[str, tuple]]]:
    """Every stage with a key by name, the smaller the better. A stage has those alone that came to it from the one
    before: controls come in on the last rung, so they have no place in the order of earlier ones.
    """
    keys_by_stage: list[tuple[str, dict[str, tuple]]] = [("cheap", {c.name: (i,) for i, c in enumerate(outcome.tried)})]
    for rung, results in zip(outcome.schedule, outcome.rungs, strict=True):
        keys = {c.name: results[c.name].score.key for c in outcome.tried if c.name in results and results[c.name].score}
        keys_by_stage.append((str(rung.share), keys))
    return keys_by_stage


def changes(outcome: Outcome) -> list[Change]:
    """How the order changed from each stage to the next, among those that both have."""
    told = []
    for (first, a), (then, b) in pairwise(stages(outcome)):
        names = [name for name in a if name in b]
        tau = kendall_tau(places([a[n] for n in names]), places([b[n] for n in names]))
        told.append(Change(first, then, tau, moves(a, b), len(names)))
    return told


def places(keys: list[tuple]) -> list[int]:
    """Keys as numbers in the same order."""
    order = sorted(set(keys))
    return [order.index(key) for key in keys]


def foretold(outcome: Outcome) -> dict[str, float | None]:
    """Kendall's tau between each cheap number (turned so that better is first) and the first rung's scores."""
    _, keys = stages(outcome)[1]
    taus = {}
    for number in FORETELL:
        values = {name: getattr(outcome.cheap[name], number) for name in keys}
        if any(value is None for value in values.values()):
            continue
        wish = 1 if number == "kappa" else -1
        taus[number] = kendall_tau([wish * values[n] for n in keys], places(list(keys.values())))
    return taus


def pareto(outcome: Outcome) -> list[str]:
    """Names that no other candidate is at least as good as in parameters, memory and latency (as far as known of all)
    and in score, compared on the last rung that both saw. A control is compared with those of the last rung.
    """
    everyone = outcome.everyone
    known = [
        key
        for key in ("parameters", "memory", "latency")
        if all(getattr(outcome.cheap[name], key) is not None for name in everyone)
    ]
    last = {name for name in outcome.rungs[-1] if name in everyone}
    costs = {name: [getattr(outcome.cheap[name], key) for key in known] for name in everyone}
    points = {name: (costs[name], [score.key for score in outcome.scores(name)]) for name in everyone}
    tried = {c.name for c in outcome.tried}
    among_tried = set(front({name: point for name, point in points.items() if name in tried}))
    at_the_end = set(front({name: (points[name][0], points[name][1][-1:]) for name in last}))
    return [n for n in everyone if (n in among_tried or n not in tried) and (n in at_the_end or n not in last)]


def as_good(outcome: Outcome) -> list[Candidate]:
    """Finalists that the winner's margin does not tell from it: within one standard error of the difference, counted as
    if the samples were independent (they are shared, so this is cautious). Empty where the metric has no standard
    error.
    """
    last = outcome.rungs[-1]
    best = last[outcome.winner.name].score
    others = []
    for other in outcome.finalists[1:]:
        score = last[other.name].score
        if best.error is not None and abs(best.value - score.value) <= hypot(best.error, score.error):
            others.append(other)
    return others


def document(outcome: Outcome, command: str, extra: dict[str, Any]) -> JsonObject:
    """The search as one JSON document."""
    on_front = set(pareto(outcome))
    place = {c.name: i for i, c in enumerate(outcome.tried, 1)}
    rows = []
    for candidate in (*outcome.everyone.values(), outcome.original):
        name = candidate.name
        rows.append(
            {
                "name": name,
                "shape": candidate.shape.as_dict(),
                "control_of": candidate.control_of,
                "cheap": asdict(outcome.cheap[name]),
                "cheap_rank": place.get(name),
                "scores": {
                    str(rung.share): asdict(results[name].score) if results[name].score else None
                    for rung, results in zip(outcome.schedule, outcome.rungs, strict=True)
                    if name in results
                },
                "failed": next((r[name].failed for r in outcome.rungs if name in r and r[name].failed), None),
                "pareto": name in on_front,
            }
        )
    budget = outcome.budget
    return {
        "schema_version": 1,
        "source": outcome.source.name,
        "budget": {"parameters": budget.parameters, "memory_bytes": budget.memory, "latency_ms": budget.latency},
        "space": {
            "shapes": outcome.space.looked_at,
            "too_large": outcome.space.too_large,
            "refused": outcome.space.refused,
            "within_budget": len(outcome.space.candidates),
        },
        "rungs": [{"share": str(r.share), "candidates": r.size} for r in outcome.schedule],
        "candidates": rows,
        "source_row": outcome.original.name,
        "winner": outcome.winner.name,
        "control": outcome.control.name if outcome.control else None,
        "as_good": [c.name for c in as_good(outcome)],
        "untouched": {name: asdict(score) for name, score in outcome.untouched.items()},
        "order": {
            "changes": [
                {"from": c.before, "to": c.after, "kendall_tau": c.tau, "candidates": c.count, "moved_up": c.moves}
                for c in changes(outcome)
            ],
            "foretold": foretold(outcome),
        },
        "command": command,
    } | extra
