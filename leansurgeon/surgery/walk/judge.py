"""How far a candidate's output is from the teacher's on the guard samples. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from leansurgeon.checkpoints.blockwise.stream import Stream
from leansurgeon.checkpoints.recorded.decided import GuardScore
from leansurgeon.measure.data.batches import Batch, on
from leansurgeon.surgery.refit.block import flat, relative_error
from leansurgeon.surgery.walk.ground import Ground, View


def judge(ground: Ground, view: View, teacher: Stream, students: Sequence[Stream]) -> list[GuardScore]:
    """How far every student's output is from the teacher's (streams of the guard behind the last block), and its loss
    where there are labels: divergence of the predictions (nats a token) where the model predicts the classes of the
    labels, else relative error (of hidden states, of a regression).
    """
    tallies = [Tally() for _ in students]
    tell(ground, view, teacher, students, tallies)
    guards = ground.calibration.guards if view.seen == "all" else ()
    return [replace(tally.score(), by_source=tally.by_source(guards) if guards else ()) for tally in tallies]


def tell(
    ground: Ground, view: View, teacher: Stream, students: Sequence[Stream], tallies: Sequence[Tally], first: int = 0
) -> None:
    """Add to the tallies what the students' streams say, which hold the guard's batches from `first` on; the teacher's
    holds all.
    """
    config = ground.source.architecture.flat(ground.source.config)
    regression = config.get("problem_type") == "regression"
    for b in range(len(students[0].hidden) if students else 0):
        batch, mask = view.batches["guard"][first + b], view.answers["guard"][first + b]
        target = teacher.head(first + b, teacher.hidden[first + b])  # logits of all batches at once would not fit
        said = None  # the teacher's log probabilities, the same for all students
        for student, tally in zip(students, tallies, strict=True):
            logits = student.head(b, student.hidden[b])
            labelled = teacher.predicts and not regression and classes_of(logits, batch)
            score = ground.calibration.score(logits, on(batch, logits.device)) if labelled else None
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
    rows: int = 0
    batches: list[int] = field(default_factory=list)  # tokens of every batch
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
        self.rows += len(a)
        self.batches.append(len(a))
        if score:
            self.loss, self.scored = self.loss + score[0], self.scored + score[1]

    def judged(self) -> Tensor:
        """What judges, of every token (N,) in float64."""
        return torch.cat(self.divergences if self.predicts else self.errors)

    def by_source(self, guards: Sequence[int]) -> tuple[float, ...]:
        """The mean of what judges over the batches of each source; `guards` are the batches' sources."""
        values = self.judged().split(self.batches)
        of = [[v for v, g in zip(values, guards, strict=True) if g == i] for i in range(max(guards) + 1)]
        return tuple(round(float(torch.cat(losses).mean()), 6) if losses else 0.0 for losses in of)

    def score(self) -> GuardScore:
        """Means over the guard: error, divergence and loss, as far as known, and the one that judges."""
        error = round(total(self.errors) / self.rows, 6)
        divergence = round(total(self.divergences) / self.rows, 6) if self.predicts else None
        loss = round(self.loss / self.scored, 6) if self.scored else None
        return GuardScore(error, divergence, loss, error if divergence is None else divergence)


def total(parts: Sequence[Tensor]) -> float:
    """The sum of all values."""
    return sum(float(part.sum()) for part in parts)
