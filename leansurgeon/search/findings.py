"""Present the result of a search: its table, JSON document and sentences. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import hypot
from typing import Any

from leansurgeon.errors import plural
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.report.humans import NONE, change, count, join_words, memory, plain
from leansurgeon.search.cheap import CheapScores
from leansurgeon.search.halving import Result
from leansurgeon.search.outcome import SearchOutcome
from leansurgeon.search.space import Candidate, Shapes
from leansurgeon.words import in_columns


@dataclass(frozen=True)
class Finding:
    """One candidate, control or the source: its rank by the cheap scores (from 1), and its results by rung."""

    candidate: Candidate
    numbers: CheapScores
    place: int | None
    results: dict[str, Result]
    on_front: bool


def list_findings(outcome: SearchOutcome) -> list[Finding]:
    """Return candidates, then controls, the source last."""
    front, names = find_front(outcome), [c.name for c in outcome.tried]
    return [
        Finding(
            candidate,
            outcome.cheap[name],
            names.index(name) + 1 if name in names else None,
            {str(g.share): r[name] for g, r in zip(outcome.schedule, outcome.rungs, strict=True) if name in r},
            name in front,
        )
        for candidate in (*outcome.everyone.values(), outcome.original)
        for name in (candidate.name,)
    ]


# -- orders ---------------------------------------------------------------------------------------


def kendall_tau(a: Sequence[Any], b: Sequence[Any]) -> float | None:
    """Return Kendall's tau-b (1945) of two lists of keys for the same items; None if one list has a single value."""
    from scipy.stats import kendalltau

    if min(len(set(a)), len(set(b))) < 2:
        return None
    places = ([sorted(set(keys)).index(key) for key in keys] for keys in (a, b))
    return float(kendalltau(*places).statistic)


def list_changes(outcome: SearchOutcome) -> list[dict[str, Any]]:
    """Return how the order changed from each stage to the next, among candidates in both: Kendall's tau, and the places
    that candidates moved up (down: negative).
    """
    # Keys by name, the smaller the better. Only candidates that came from the stage before count: controls enter on the
    # last rung, so they have no place in the order of earlier ones.
    stages: list[tuple[str, dict[str, tuple]]] = [("cheap", {c.name: (i,) for i, c in enumerate(outcome.tried)})]
    for rung, results in zip(outcome.schedule, outcome.rungs, strict=True):
        scores = {c.name: results[c.name].score for c in outcome.tried if c.name in results}
        stages.append((str(rung.share), {name: score.key for name, score in scores.items() if score}))
    changes = []
    for (first, a), (then, b) in pairwise(stages):
        names = [name for name in a if name in b]
        before = sorted(names, key=a.__getitem__)
        after = sorted(before, key=b.__getitem__)
        moves = {name: before.index(name) - after.index(name) for name in names}
        tau = kendall_tau([a[n] for n in names], [b[n] for n in names])
        changes.append({"from": first, "to": then, "kendall_tau": tau, "candidates": len(names), "moved_up": moves})
    return changes


def find_front(outcome: SearchOutcome) -> list[str]:
    """Return the Pareto front: candidates that no other one dominates in parameters, memory and latency (as far as
    known for all) and score. Candidates are compared on the last rung that both reached, since a longer training is no
    merit of a shape; a control is compared on the last rung.
    """
    everyone, tried, last = outcome.everyone, {c.name for c in outcome.tried}, outcome.rungs[-1]
    numbers = [[getattr(outcome.cheap[n], key) for n in everyone] for key in ("parameters", "memory", "latency")]
    known = [values for values in numbers if None not in values]
    costs = dict(zip(everyone, zip(*known, strict=True), strict=True))
    keys = {name: [score.key for score in outcome.scores(name)] for name in everyone}

    def beats(a: str, b: str) -> bool:
        """Return whether `a` is nowhere worse than `b` and somewhere better."""
        rungs = [min(len(keys[a]), len(keys[b])) - 1] if {a, b} <= tried else []
        rungs += [-1] if a in last and b in last else []
        pairs = [((*costs[a], keys[a][i]), (*costs[b], keys[b][i])) for i in rungs if keys[a]]
        return any(x != y and all(p <= q for p, q in zip(x, y, strict=True)) for x, y in pairs)

    return [b for b in everyone if keys[b] and not any(beats(a, b) for a in everyone if a != b)]


def list_as_good(outcome: SearchOutcome) -> list[Candidate]:
    """Return the finalists that are as good as the winner: within one standard error of the difference, computed as if
    the samples were independent (they are shared, so this is conservative). Empty if the metric has no standard error.
    """
    winner, *others = ((c, outcome.rungs[-1][c.name].score) for c in outcome.finalists)
    best = winner[1]
    return [
        candidate
        for candidate, score in others
        if best.error is not None and abs(best.value - score.value) <= hypot(best.error, score.error)
    ]


def make_document(outcome: SearchOutcome, command: str, extra: dict[str, Any]) -> JsonObject:
    """Return the search as one JSON document."""
    rows = [
        {
            "name": one.candidate.name,
            "shape": one.candidate.shape.as_dict(),
            "control_of": one.candidate.control_of,
            "cheap": asdict(one.numbers),
            "cheap_rank": one.place,
            "scores": {share: result.score and asdict(result.score) for share, result in one.results.items()},
            "failed": next((result.failed for result in one.results.values() if result.failed), None),
            "pareto": one.on_front,
        }
        for one in list_findings(outcome)
    ]
    budget, space = outcome.budget, outcome.space
    return {
        "schema_version": 1,
        "source": outcome.source.name,
        "budget": {"parameters": budget.parameters, "memory_bytes": budget.memory, "latency_ms": budget.latency},
        "space": {
            "shapes": space.looked_at,
            "too_large": space.too_large,
            "refused": space.refused,
            "within_budget": len(space.candidates),
        },
        "rungs": [{"share": str(r.share), "candidates": r.size} for r in outcome.schedule],
        "candidates": rows,
        "source_row": outcome.original.name,
        "winner": outcome.winner.name,
        "control": outcome.control.name if outcome.control else None,
        "as_good": [c.name for c in list_as_good(outcome)],
        "untouched": {name: asdict(score) for name, score in outcome.untouched.items()},
        "order": {"changes": list_changes(outcome)},
        "command": command,
    } | extra


# -- table ----------------------------------------------------------------------------------------


def make_table(outcome: SearchOutcome) -> str:
    """Return the table of candidates and controls, sorted by longest rung and score; the source last."""

    shares = [str(rung.share) for rung in outcome.schedule]
    called = {outcome.winner.name: "winner"} | ({outcome.control.name: "control"} if outcome.control else {})
    *others, source = list_findings(outcome)

    def success(one: Finding) -> tuple:
        """Sort key: the last rung it reached, then its score there."""
        seen = [i for i, share in enumerate(shares) if (result := one.results.get(share)) and result.score]
        last = max(seen, default=-1)
        return -last, one.results[shares[last]].score.key if seen else (), one.candidate.parameters

    rows = []
    for one in (*sorted(others, key=success), source):
        otherwise = "" if one.candidate.more_heads else "old heads"
        name = "source" if one is source else called.get(one.candidate.name, otherwise)
        cells = {"": name + " *" * one.on_front} | shape_cells(one.candidate, one.numbers)
        cells["cheap"] = str(one.place or NONE)
        for share in shares:
            result = one.results.get(share)
            cells[share] = NONE if result is None else result.score.text if result.score else "failed"
        rows.append(cells)
    return draw_cells(rows)


def draw_cells(rows: Sequence[dict[str, str]]) -> str:
    """Format the columns that have any content, with their heads."""
    columns = [c for c in rows[0] if any(r[c] != NONE for r in rows)]
    return in_columns(columns, [[row[c] for c in columns] for row in rows])


def shape_cells(candidate: Candidate, numbers: CheapScores) -> dict[str, str]:
    """Return layers, heads, MLP and costs of a candidate."""
    shape = candidate.shape
    return {
        "layers": shape.column("depth"),
        "heads": shape.column("heads"),
        "MLP": shape.column("mlp_dim"),
        "params": count(numbers.parameters, short=True),
        "memory": memory(numbers.memory),
        "ms": plain(numbers.latency),
    }


# -- sentences ------------------------------------------------------------------------------------


def describe_space(space: Shapes) -> str:
    """Describe the space: `180 shapes: 12 cannot be made, 100 are too large and 68 fit the budget in parameters.`"""
    parts = [f"{sum(space.refused.values()):,} cannot be made"] if space.refused else []
    parts += [f"{space.too_large:,} are too large"] if space.too_large else []
    # Without a limit of parameters, or if it excludes nothing, other limits are not mentioned.
    parts += [f"{len(space.candidates):,} {'fit the budget in parameters' if space.too_large else 'can be made'}"]
    return f"{plural(space.looked_at, 'shape')}: {join_words(parts)}."


def describe(outcome: SearchOutcome) -> list[str]:
    """Describe the result, one paragraph per entry."""
    winner, score = outcome.winner, outcome.rungs[-1][outcome.winner.name].score
    error = "" if score.error is None else f" (standard error {100 * score.error:.1f} points)"
    lines = [
        f"Winner: {name_shape(winner)}: {score.label} {score.text}{error}, {winner.parameters:,} "
        f"parameters ({change(winner.parameters, outcome.original.parameters)}).",
        compare_with_control(outcome),
    ]
    if untouched := outcome.untouched:
        names = {winner.name: "winner", outcome.original.name: "source"}
        told = [f"{names.get(name, 'control')} {score.text}" for name, score in untouched.items()]
        some = next(iter(untouched.values()))
        lines.append(f"On {plural(some.samples, 'held-out sample')} not used for the choice: {join_words(told)}.")
    else:
        lines.append(
            "The winner was chosen on the evaluation data, so its score is optimistic: train it, its control and the "
            "source on other seeds before you believe the difference."
        )
    for step in list_changes(outcome):
        if step["kendall_tau"] is not None:
            stages = f"Order {step['from']} to {step['to']}, {plural(step['candidates'], 'shape')}"
            lines.append(f"{stages}: Kendall's tau {step['kendall_tau']:+.2f}.")
    return [*lines, outcome.says] if outcome.says else lines


def compare_with_control(outcome: SearchOutcome) -> str:
    """Say what the control shows about the winner's heads."""
    last, winner, other = outcome.rungs[-1], outcome.winner, outcome.control
    if not winner.more_heads:
        rival = next((c for c in outcome.finalists if c.more_heads), None)
        beside = f"; the best with more, {name_shape(rival)}, has {last[rival.name].score.text}" if rival else ""
        return f"It has the old number of heads{beside}."
    score = last[other.name].score if other and other.name in last else None
    if score is None:
        return "It has no control: no MLP gives the old heads as many parameters."
    best = last[winner.name].score
    said = f"Its control, {name_shape(other)}, has {score.text} with {other.parameters:,} parameters"
    if best.error is None:
        return f"{said}."
    apart = abs(best.value - score.value) > 2 * (best.error**2 + score.error**2) ** 0.5
    return f"{said}, so more heads {'seem to help here' if apart else 'are not shown to help'}."


def name_shape(candidate: Candidate) -> str:
    """Describe a candidate's shape in words."""
    shape = candidate.shape
    layers, heads = plural(shape.column("depth"), "layer"), plural(shape.column("heads"), "head")
    return f"{layers} x {heads}, MLP {shape.column('mlp_dim')}"
