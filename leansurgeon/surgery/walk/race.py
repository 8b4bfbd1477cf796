"""Sets of layers race on the guard: those that cannot win are not judged, nor walked behind their cut, any further.

All are refitted at their cuts; behind them the first piece of the guard alone is walked. What a candidate loses to the
best one there, token by token, gives a bound on what it loses on all; whose bound says that it does not come within
`CLOSE` of the best is out, the others walk on with twice as many pieces, and so on. A candidate within that factor may
still win on all of the data.

The bound is one of statistics, and no certainty: the mean of the paired losses over runs of neighbouring tokens, which
say nearly the same, is taken to be Student's. In one contest of a hundred times `ERROR` at most, a candidate is dropped
that belonged to those left. Imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, sqrt

import torch
from scipy.stats import t as student_t
from torch import Tensor

from leansurgeon.checkpoints.blockwise.stream import Stream
from leansurgeon.checkpoints.recorded.decided import GuardScore, Tried
from leansurgeon.progress import track
from leansurgeon.surgery.walk.ground import Ground, View
from leansurgeon.surgery.walk.judge import Tally, tell
from leansurgeon.surgery.walk.student import Student

CLOSE = 1.05  # a set of layers within this factor of the best one's trial score is tried on all of the data, too
ERROR = 0.05  # chance, over all candidates and rounds, that one of those that are left out belonged in
RUN = 32  # neighbouring tokens that count as one observation
LEAST = 6  # observations; fewer bound nothing


def race(
    ground: Ground,
    view: View,
    students: Sequence[Student],
    teacher: Stream,
    tried: list[Tried],
    most: float = inf,
) -> list[tuple[Student, float]]:
    """Judge students that have walked the first piece of the guard to the end; `teacher` has walked all pieces. Returns
    those that are left with their scores, and appends to `tried` what everybody's was when it was left out. The cut may
    come to `most` block-tokens by it.
    """
    pieces = len(view.batches["guard"])
    left, tallies, judged = list(range(len(students))), [Tally() for _ in students], 0
    scores: dict[int, GuardScore] = {}
    while True:
        until = min(pieces, max(1, 2 * judged))
        if judged:
            dear = sum(ground.tokens(view.batches["guard"][judged:until]) * students[i].behind for i in left)
            if dear > most - ground.work:
                ground.held_back.append(f"sets of layers were judged on {judged} of {pieces} pieces of the guard")
                break
            walk_behind(ground, [students[i] for i in left], until - judged)
        tell(ground, view, teacher, [students[i].streams["guard"] for i in left], [tallies[i] for i in left], judged)
        judged = until
        scores |= {i: replace(tallies[i].score(), pieces=judged) for i in left}
        if judged == pieces:
            break
        left = survivors(left, tallies, len(students) * rounds(pieces))
        if len(left) == 1:
            break
    for i, student in enumerate(students):
        tried.append(student.candidate.tried(scores[i], view.seen, left_out=i not in left))
    return [(students[i], scores[i].judged_by) for i in left]


def rounds(pieces: int) -> int:
    """How often candidates may be left out: after 1, 2, 4 ... of the pieces."""
    return max(1, (pieces - 1).bit_length())


def survivors(left: Sequence[int], tallies: Sequence[Tally], tests: int) -> list[int]:
    """Those that may come within `CLOSE` of the best, of which there always is one. `tests` share the `ERROR`."""
    values = {i: tallies[i].judged() for i in left}
    best = min(left, key=lambda i: (float(values[i].mean()), i))
    return [i for i in left if i == best or lower_bound(values[i] - CLOSE * values[best], ERROR / tests) <= 0]


def lower_bound(values: Tensor, chance: float) -> float:
    """What the mean of which these (N,) are a sample is under by this chance at most; -inf where they are too few.

    >>> lower_bound(torch.ones(64), 1e-3)
    1.0
    """
    size = max(1, min(RUN, len(values) // (2 * LEAST)))
    means = values[: len(values) // size * size].reshape(-1, size).mean(1).double()
    if len(means) < LEAST or chance <= 0:
        return -inf
    error = float(means.std()) / sqrt(len(means))
    return float(means.mean()) - float(student_t.isf(chance, len(means) - 1)) * error


@torch.no_grad()
def walk_behind(ground: Ground, students: Sequence[Student], pieces: int) -> None:
    """The students' next pieces from where they wait behind the last layer that was made, to the end."""
    for student in students:
        student.go_on(pieces)
    for layer in track(range(ground.teacher.depth), "judging on", "layers/s"):
        for student in students:
            if student.until == layer:
                student.pass_on()
        ground.give_back()
