"""Plain successive halving (Jamieson and Talwalkar, 2016): many candidates for a short time, the better half for twice
as long, until two are left. Numbers only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from leansurgeon.errors import LeanSurgeonError, plural
from leansurgeon.progress import Say, silent
from leansurgeon.search.space import Candidate


@dataclass(frozen=True)
class Rung:
    """`size` candidates, each for `share` of the full length."""

    number: int
    size: int
    share: Fraction


@dataclass(frozen=True)
class Score:
    """A metric on held-out samples. `error` is its standard error if it is a share of right answers among `samples`."""

    value: float
    label: str
    higher: bool
    percent: bool
    loss: float | None = None
    samples: int | None = None
    error: float | None = None

    @property
    def key(self) -> tuple[float, float]:
        """Sort key, smaller is better: the metric, then the loss."""
        return (-self.value if self.higher else self.value), self.loss if self.loss is not None else 0.0

    @property
    def text(self) -> str:
        """The value formatted for reading."""
        return f"{100 * self.value:.1f} %" if self.percent else f"{self.value:.4g}"


@dataclass(frozen=True)
class Result:
    """Result of a candidate on a rung: a score, or why there is none."""

    score: Score | None
    failed: str | None = None


Results: TypeAlias = dict[str, Result]  # by the candidate's name


def schedule(tries: int) -> list[Rung]:
    """Return R = max(1, ceil(log2 tries)) rungs: on rung r (from 0) ceil(tries / 2^r) candidates for 2^(r - R + 1) of
    the full length. The last rung has two candidates (one, if there is only one) and the full length; with tries = 2^R
    every rung costs two full lengths.
    """
    count = max(1, (tries - 1).bit_length())
    return [Rung(r + 1, -(-tries // 2**r), Fraction(1, 2 ** (count - 1 - r))) for r in range(count)]


def climb(
    candidates: Sequence[Candidate],
    attempt: Callable[[Rung, Sequence[Candidate]], Results],
    *,
    beside: Callable[[Sequence[Candidate]], Sequence[Candidate]] = lambda survivors: (),
    say: Say = silent,
) -> list[Results]:
    """Run all rungs and return the results of each, by name. `candidates` are in the order of the cheap scores, which
    breaks ties; `beside` returns what to try on the last rung in addition to the survivors (their controls).

    Raises `LeanSurgeonError` if nothing on a rung has a score.
    """
    results = []
    alive, rungs = list(candidates), schedule(len(candidates))
    for rung in rungs:
        alive = alive[: rung.size]
        last = rung is rungs[-1]
        names = {c.name for c in alive}
        extra = [c for c in beside(alive) if c.name not in names] if last else []
        length = "the full length" if rung.share == 1 else f"{rung.share} of the full length"
        also = f" and {', '.join(c.name for c in extra)}" if extra else ""
        say(f"Rung {rung.number} of {len(rungs)}: {plural(len(alive), 'candidate')}{also}, {length}")
        here = attempt(rung, [*alive, *extra])
        results.append(here)
        alive = order_candidates(alive, here)
        if not alive:
            why = next(result.failed for result in here.values() if result.failed)
            raise LeanSurgeonError(f"None of the {len(here)} candidates of rung {rung.number} has a score: {why}")
    return results


def order_candidates(candidates: Sequence[Candidate], results: dict[str, Result]) -> list[Candidate]:
    """Return those with a score, the best first; ties by size, then by the given order."""
    scored = [c for c in candidates if results[c.name].score is not None]
    return sorted(scored, key=lambda c: (*results[c.name].score.key, c.parameters))
