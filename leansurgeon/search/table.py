"""A search in 80 columns. No torch."""

from __future__ import annotations

from leansurgeon.errors import plural
from leansurgeon.report.humans import NONE, change, count, listed, memory, plain
from leansurgeon.search.cheap import Cheap
from leansurgeon.search.outcome import Outcome
from leansurgeon.search.score import Score
from leansurgeon.search.space import Candidate, Shapes
from leansurgeon.search.verdict import TOLD, as_good, changes, foretold, pareto
from leansurgeon.words import WIDTH, in_columns

# What is left out first where the table would be too wide.
LEFT_OUT = ("kept", "kappa", "cheap", "memory")


def table(outcome: Outcome) -> str:
    """Candidates and controls, the best first by the longest rung that they saw; the source last."""
    on_front = set(pareto(outcome))
    place = {c.name: i for i, c in enumerate(outcome.tried, 1)}
    rows = [row(outcome, c, c.name in on_front, place.get(c.name)) for c in by_success(outcome)]
    rows.append(row(outcome, outcome.original, False, None))
    columns = [c for c in rows[0] if any(r[c] != NONE for r in rows)]
    for name in (None, *LEFT_OUT):
        columns = [c for c in columns if c != name]
        text = lines_of(rows, columns)
        if len(text.splitlines()[0]) <= WIDTH:
            break
    return text


def lines_of(rows: list[dict[str, str]], columns: list[str]) -> str:
    """These columns of the rows, under their heads."""
    return in_columns(columns, [[row[c] for c in columns] for row in rows])


def by_success(outcome: Outcome) -> list[Candidate]:
    """Candidates in the order of the last rung that they reached, then of their score there."""

    def key(candidate: Candidate) -> tuple:
        seen = [i for i, rung in enumerate(outcome.rungs) if candidate.name in rung and rung[candidate.name].score]
        best = outcome.rungs[seen[-1]][candidate.name].score.key if seen else ()
        return (-(seen[-1] if seen else -1), best, candidate.parameters)

    return sorted(outcome.everyone.values(), key=key)


def row(outcome: Outcome, candidate: Candidate, on_front: bool, place: int | None) -> dict[str, str]:
    """One candidate's cells by the head of their column."""
    numbers = outcome.cheap[candidate.name]
    cells = {"": label(outcome, candidate) + (" *" if on_front else "")} | shape_cells(candidate, numbers)
    cells |= {"cheap": str(place) if place else NONE}
    for rung, results in zip(outcome.schedule, outcome.rungs, strict=True):
        result = results.get(candidate.name)
        text = NONE if result is None else result.score.text if result.score else "failed"
        cells[str(rung.share)] = text
    return cells


def label(outcome: Outcome, candidate: Candidate) -> str:
    """`source`, `winner`, `control`, or the place among those that were tried."""
    if candidate is outcome.original:
        return "source"
    if candidate.name == outcome.winner.name:
        return "winner"
    if outcome.control and candidate.name == outcome.control.name:
        return "control"
    return "old heads" if not candidate.more_heads else ""


def shape_cells(candidate: Candidate, numbers: Cheap) -> dict[str, str]:
    """Layers, heads, MLP and costs of a candidate."""
    shape = candidate.shape
    return {
        "layers": shape.column("depth"),
        "heads": shape.column("heads"),
        "MLP": shape.column("mlp_dim"),
        "params": count(numbers.parameters, short=True),
        "memory": memory(numbers.memory),
        "ms": plain(numbers.latency),
        "kept": NONE if numbers.influence is None else f"{100 * numbers.influence:.0f} %",
        "kappa": plain(numbers.kappa),
    }


def candidates_table(ranked: list[Candidate], numbers: dict[str, Cheap], most: int = 20) -> str:
    """The candidates of a dry run in the order of the cheap scores."""
    cells = [shape_cells(c, numbers[c.name]) | {"head_dim": c.shape.column("head_dim")} for c in ranked[:most]]
    return lines_of(cells, [c for c in cells[0] if any(r[c] != NONE for r in cells)])


# -- sentences ------------------------------------------------------------------------------------


def space_line(space: Shapes) -> str:
    """`180 shapes: 12 cannot be made, 100 are too large and 68 fit the budget in parameters.`"""
    parts = [f"{sum(space.refused.values()):,} cannot be made"] if space.refused else []
    parts += [f"{space.too_large:,} are too large"] if space.too_large else []
    # Without a limit of parameters, or where it excludes nothing, this says nothing of the other limits.
    parts += [f"{len(space.candidates):,} {'fit the budget in parameters' if space.too_large else 'can be made'}"]
    return f"{plural(space.looked_at, 'shape')}: {listed(parts)}."


def sentences(outcome: Outcome) -> list[str]:
    """What may be said, one paragraph each."""
    winner, score = outcome.winner, outcome.rungs[-1][outcome.winner.name].score
    lines = [
        f"Winner: {named(winner)}: {score.label} {score.text}{error(score)}, {winner.parameters:,} parameters "
        f"({change(winner.parameters, outcome.original.parameters)})."
    ]
    lines.append(of_control(outcome))
    if untouched := outcome.untouched:
        names = {winner.name: "winner", outcome.original.name: "source"}
        told = [f"{names.get(name, 'control')} {score.text}" for name, score in untouched.items()]
        some = next(iter(untouched.values()))
        lines.append(f"On {plural(some.samples, 'held-out sample')} that chose nothing: {listed(told)}.")
    else:
        lines.append(
            "The evaluation data chose the winner, which flatters it: train it, its control and the source on other "
            "seeds before you believe the difference."
        )
    if others := as_good(outcome):
        small = min((winner, *others), key=lambda c: c.parameters)
        less = f"; the smallest is {named(small)} with {small.parameters:,} parameters" if small is not winner else ""
        lines.append(f"Not to be told from it (one standard error): {listed(named(c) for c in others)}{less}.")
    lines += order_lines(outcome)
    if outcome.says:
        lines.append(outcome.says)
    return [line for line in lines if line]


def of_control(outcome: Outcome) -> str:
    """What the control says of the winner's heads."""
    last, winner, other = outcome.rungs[-1], outcome.winner, outcome.control
    if not winner.more_heads:
        rival = next((c for c in outcome.finalists if c.more_heads), None)
        beside = f"; the best with more, {named(rival)}, has {last[rival.name].score.text}" if rival else ""
        return f"It has the old number of heads{beside}."
    score = last[other.name].score if other and other.name in last else None
    if score is None:
        return "It has no control: no MLP gives the old heads as many parameters."
    best = last[winner.name].score
    said = f"Its control, {named(other)}, has {score.text} with {other.parameters:,} parameters"
    if best.error is None:
        return f"{said}."
    apart = abs(best.value - score.value) > 2 * (best.error**2 + score.error**2) ** 0.5
    return f"{said}, so more heads {'seem to help here' if apart else 'are not shown to help'}."


def order_lines(outcome: Outcome) -> list[str]:
    """How the order changed, and what foretold the first rung."""
    lines = []
    for step in changes(outcome):
        if step.tau is None:
            continue
        far = sorted(step.moves.items(), key=lambda item: (-abs(item[1]), item[0]))[:TOLD]
        told = [f"{name} {'up' if by > 0 else 'down'} {abs(by)}" for name, by in far if by]
        moved = f" ({', '.join(told)})" if told else ""
        lines.append(
            f"Order {step.before} to {step.after}, {plural(step.count, 'shape')}: Kendall's tau {step.tau:+.2f}{moved}."
        )
    known = [f"{name} {tau:+.2f}" for name, tau in foretold(outcome).items() if tau is not None]
    if known:
        lines.append(f"What foretold the first rung (tau): {', '.join(known)}.")
    return lines


def named(candidate: Candidate) -> str:
    """A candidate's shape in words."""
    shape = candidate.shape
    layers, heads = plural(shape.column("depth"), "layer"), plural(shape.column("heads"), "head")
    return f"{layers} x {heads}, MLP {shape.column('mlp_dim')}"


def error(score: Score) -> str:
    """` +- 0.9 points` of the sample, ` +- 0.3 over seeds`."""
    if score.spread is not None:
        return f" (sd over seeds {100 * score.spread:.1f} points)" if score.percent else f" (sd {score.spread:.3g})"
    return f" (standard error {100 * score.error:.1f} points)" if score.error is not None else ""
