"""How far a candidate's output is from the teacher's on the guard samples, and the race of sets of layers on them:
those that cannot win are neither judged nor run behind their cut any further.

All are refitted at their cuts; behind them the first piece of the guard alone is run. What a candidate loses to the
best one there, token by token, gives a bound on what it loses on all; whose bound says that it does not come within
`CLOSE` of the best is out, the others go on with twice as many pieces, and so on. A candidate within that factor may
still win on all of the data.

The bound is one of statistics, and no certainty: the mean of the paired losses over runs of neighbouring tokens, which
say nearly the same, is taken to be Student's. In one contest of a hundred times `ERROR` at most, a candidate is dropped
that belonged to those left. Imports torch.
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

CLOSE = 1.05  # a set of layers within this factor of the best one's trial score is tried on all of the data, too
ERROR = 0.05  # chance, over all candidates and rounds, that one of those that are left out belonged in
RUN = 32  # neighbouring tokens that count as one observation
LEAST = 6  # observations; fewer bound nothing


def judge(
    context: CalibrationContext, view: SampleView, teacher: Stream, students: Sequence[Stream]
) -> list[GuardScore]:
    """How far every student's output is from the teacher's (streams of the guard behind the last block), and its loss
    where there are labels: divergence of the predictions (nats a token) where the model predicts the classes of the
    labels, else relative error (of hidden states, of a regression).
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
    `first` on, the teacher's holds all.
    """
    config = context.source.flat_config
    regression = config.get("problem_type") == "regression"
    for b in range(len(students[0].hidden) if students else 0):
        batch, mask = view.batches["guard"][first + b], view.answers["guard"][first + b]
        target = teacher.head(first + b, teacher.hidden[first + b])  # logits of all batches at once would not fit
        said = None  # the teacher's log probabilities, the same for all students
        for student, tally in zip(students, tallies, strict=True):
            logits = student.head(b, student.hidden[b])
            labelled = teacher.predicts and not regression and classes_of(logits, batch)
            score = context.calibration.score(logits, on(batch, logits.device)) if labelled else None
            if score is not None and said is None:
                said = torch.log_softmax(flat(target, mask).float(), -1)
            tally.add(logits, target, mask, score, said)


def classes_of(logits: Tensor, batch: Batch) -> bool:
    """Whether the labels of a batch can be classes of these outputs, one label for every vector."""
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
    predicts: bool = True  # every batch has had a score

    def add(
        self,
        logits: Tensor,
        target: Tensor,
        mask: Tensor | None,
        score: tuple[float, float] | None,
        said: Tensor | None,
    ) -> None:
        """One batch; `score` is loss sum and count, None where the outputs are no predictions of its labels; `said`
        then are the log probabilities of `target` at the real tokens.
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

    def values_of_tokens(self) -> Tensor:
        """What judges, of every token (N,) in float64."""
        return torch.cat(self.divergences if self.predicts else self.errors)

    def score(self) -> GuardScore:
        """Means over the guard: error, divergence and loss, as far as known, and the one that judges."""
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
    """Judge students that have seen the first piece of the guard to the end; `teacher` has seen all pieces. Returns
    those that are left with their scores, and notes what everybody's was when it was left out. The cut may come to
    `most` block-tokens by it.
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
    """How often candidates may be left out: after 1, 2, 4 ... of the pieces."""
    return max(1, (pieces - 1).bit_length())


def survivors(left: Sequence[int], tallies: Sequence[Tally], tests: int) -> list[int]:
    """Those that may come within `CLOSE` of the best, of which there always is one. `tests` share the `ERROR`."""
    values = {i: tallies[i].values_of_tokens() for i in left}
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
def walk_behind(context: CalibrationContext, students: Sequence[CandidateModel], pieces: int) -> None:
    """The students' next pieces from where they wait behind the last layer that was made, to the end."""
    for student in students:
        student.go_on(pieces)
    for layer in track(range(context.teacher.depth), "judging on", "layers/s"):
        for student in students:
            if student.until == layer:
                student.pass_on()
        context.give_back()
