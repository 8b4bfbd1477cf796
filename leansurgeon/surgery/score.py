"""Score candidates by how far their output is from the teacher's on the guard samples, and eliminate sets of layers
that cannot win early, so that they need not run behind their cut any further.

All sets are refitted at their cuts; behind them, at first only one piece of the guard runs. The losses of a candidate
relative to the best one there, token by token, bound its loss on all pieces. A candidate that cannot come within
`CLOSE` of the best by this bound is eliminated; the others continue with twice as many pieces, and so on. A candidate
within that factor may still win on all of the data.

The bound is statistical, not certain: the mean of the paired losses, taken over runs of adjacent tokens (which are
highly correlated), is assumed to follow Student's t. The chance that a contest eliminates a candidate that belonged to
the remaining ones is at most `ERROR`. Imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf, sqrt

import torch
from scipy.stats import t as student_t
from torch import Tensor

from leansurgeon.checkpoints.blockwise.stream import Stream
from leansurgeon.checkpoints.recorded.decided import GuardScore
from leansurgeon.measure.data.batches import Batch, on
from leansurgeon.progress import track
from leansurgeon.surgery.candidate_model import CandidateModel
from leansurgeon.surgery.context import CalibrationContext, SampleView
from leansurgeon.surgery.probes import flat, relative_error

CLOSE = 1.05  # sets of layers within this factor of the best trial score are also tried on all of the data
ERROR = 0.05  # chance, over all candidates and rounds, that a set is eliminated that should have stayed
RUN = 32  # adjacent tokens that count as one observation
LEAST = 6  # minimum number of observations for a bound


def judge(
    context: CalibrationContext, view: SampleView, teacher: Stream, students: Sequence[Stream]
) -> list[GuardScore]:
    """Score how far every student's output is from the teacher's (streams of the guard behind the last block), with the
    loss if there are labels. Scored by the divergence of the predictions (nats per token) if the model predicts the
    classes of the labels, else by relative error (of hidden states, of a regression).
    """
    tallies = [Tally() for _ in students]
    add_scores(context, view, teacher, students, tallies)
    return [tally.score() for tally in tallies]


def add_scores(
    context: CalibrationContext,
    view: SampleView,
    teacher: Stream,
    students: Sequence[Stream],
    tallies: Sequence[Tally],
    first: int = 0,
) -> None:
    """Add the students' errors and losses on the guard to their tallies. Their streams hold the guard's batches from
    `first` on; the teacher's holds all.
    """
    config = context.source.flat_config
    regression = config.get("problem_type") == "regression"
    for b in range(len(students[0].hidden) if students else 0):
        batch, mask = view.batches["guard"][first + b], view.answers["guard"][first + b]
        target = teacher.head(first + b, teacher.hidden[first + b])  # one batch at a time: logits of all would not fit
        said = None  # the teacher's log probabilities, computed once for all students
        for student, tally in zip(students, tallies, strict=True):
            logits = student.head(b, student.hidden[b])
            labelled = teacher.predicts and not regression and classes_of(logits, batch)
            score = context.calibration.score(logits, on(batch, logits.device)) if labelled else None
            if score is not None and said is None:
                said = torch.log_softmax(flat(target, mask).float(), -1)
            tally.add(logits, target, mask, score, said)


def classes_of(logits: Tensor, batch: Batch) -> bool:
    """Return whether the labels of a batch can be classes of these outputs, one label per vector."""
    labels = batch.get("labels")
    if labels is None or logits.shape[-1] < 2 or logits.dim() != labels.dim() + 1:
        return False
    return not labels.is_floating_point() and int(labels.max()) < logits.shape[-1]


@dataclass
class Tally:
    """Sums over guard samples for one candidate."""

    divergences: list[Tensor] = field(default_factory=list)  # of every token
    errors: list[Tensor] = field(default_factory=list)
    tokens: int = 0
    loss: float = 0.0
    scored: float = 0.0
    predicts: bool = True  # whether every batch has had a score

    def add(
        self,
        logits: Tensor,
        target: Tensor,
        mask: Tensor | None,
        score: tuple[float, float] | None,
        said: Tensor | None,
    ) -> None:
        """Add one batch. `score` is loss sum and count, or None if the outputs do not predict its labels; `said` then
        holds the log probabilities of `target` at the real tokens.
        """
        self.predicts &= score is not None
        a, b = (flat(x, mask) for x in (logits, target))
        rows = max(1, 2**22 // a.shape[-1])
        for start, (x, y) in enumerate(zip(a.split(rows), b.split(rows), strict=True)):
            if self.predicts:
                p, q = said[start * rows : (start + 1) * rows], torch.log_softmax(x.float(), -1)
                self.divergences.append((p.exp() * (p - q)).sum(-1).double().cpu())
            self.errors.append(relative_error(y, x).cpu())
        self.tokens += len(a)
        if score:
            self.loss, self.scored = self.loss + score[0], self.scored + score[1]

    def score(self) -> GuardScore:
        """Return the means over the guard: error, divergence and loss, as far as known, and the one that decides."""
        error, divergence = (
            round(sum(float(part.sum()) for part in parts) / self.tokens, 6)
            for parts in (self.errors, self.divergences)
        )
        divergence = divergence if self.predicts else None
        loss = round(self.loss / self.scored, 6) if self.scored else None
        return GuardScore(error, divergence, loss, error if divergence is None else divergence)


# -- choosing on growing parts of the guard --------------------------------------------------------


def race(
    context: CalibrationContext,
    view: SampleView,
    students: Sequence[CandidateModel],
    teacher: Stream,
    most: float,
) -> list[tuple[CandidateModel, float]]:
    """Judge students that have run the first piece of the guard to the end; `teacher` has run all pieces. Return those
    that remain with their scores, and record the last score of everyone. The cut may spend up to `most` block-tokens in
    total.
    """
    pieces = len(view.batches["guard"])
    left, tallies, judged = list(range(len(students))), [Tally() for _ in students], 0
    scores: dict[int, GuardScore] = {}
    while True:
        until = min(pieces, max(1, 2 * judged))
        if judged:
            dear = sum(context.tokens(view.batches["guard"][judged:until]) * students[i].behind for i in left)
            if dear > most - context.work:
                context.held_back.append(f"sets of layers were judged on {judged} of {pieces} pieces of the guard")
                break
            walk_behind(context, [students[i] for i in left], until - judged)
        add_scores(
            context, view, teacher, [students[i].streams["guard"] for i in left], [tallies[i] for i in left], judged
        )
        judged = until
        scores |= {i: replace(tallies[i].score(), pieces=judged) for i in left}
        if judged == pieces:
            break
        left = survivors(left, tallies, len(students) * rounds(pieces))
        if len(left) == 1:
            break
    for i, student in enumerate(students):
        context.tried.append(student.candidate.as_tried(scores[i], view.seen, left_out=i not in left))
    return [(students[i], scores[i].judged_by) for i in left]


def rounds(pieces: int) -> int:
    """Return how often candidates can be eliminated: after 1, 2, 4 ... of the pieces."""
    return max(1, (pieces - 1).bit_length())


def survivors(left: Sequence[int], tallies: Sequence[Tally], tests: int) -> list[int]:
    """Return the candidates that may come within `CLOSE` of the best, including the best. `tests` share the `ERROR`."""
    values = {i: torch.cat(tallies[i].divergences if tallies[i].predicts else tallies[i].errors) for i in left}
    best = min(left, key=lambda i: (float(values[i].mean()), i))
    return [i for i in left if i == best or lower_bound(values[i] - CLOSE * values[best], ERROR / tests) <= 0]


def lower_bound(values: Tensor, chance: float) -> float:
    """Return a lower confidence bound of the mean of `values` (N,): the mean is below it with at most this chance; -inf
    if there are too few.

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
def walk_behind(context: CalibrationContext, students: Sequence[CandidateModel], pieces: int) -> None:
    """Run the students' next pieces from where they wait behind the last changed layer to the end."""
    for student in students:
        student.at, rest = student.waiting
        student.waiting = student.at, rest.some(slice(pieces, None))
        student.streams = {"guard": rest.some(slice(pieces))}
    for layer in track(range(context.teacher.depth), "judging on", "layers/s"):
        for student in students:
            if student.until == layer:
                student.streams["guard"].advance(student.pass_source_through()["guard"])
                student.at += 1
        context.give_back()
