"""How far a candidate's output is from the teacher's on the guard samples. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leansurgeon.checkpoints.blockwise.stream import Stream
from leansurgeon.measure.data.batches import Batch
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.surgery.refit.block import flat, relative_error
from leansurgeon.surgery.walk.ground import Ground, View


def judge(ground: Ground, view: View, teacher: Stream, students: Sequence[Stream]) -> list[dict[str, Any]]:
    """How far every student's output is from the teacher's (streams of the guard behind the last block), and its loss
    where there are labels: divergence of the predictions (nats a token) where the model predicts the classes of the
    labels, else relative error (of hidden states, of a regression).
    """
    tallies = [Tally() for _ in students]
    config = ground.source.architecture.flat(ground.source.config)
    regression = config.get("problem_type") == "regression"
    for b, batch in enumerate(view.batches["guard"]):
        mask = view.masks["guard"][b]
        target = output(teacher, b)
        said = None  # the teacher's log probabilities, the same for all students
        for student, tally in zip(students, tallies, strict=True):
            logits = output(student, b)
            labelled = teacher.predicts and not regression and classes_of(logits, batch)
            score = ground.calibration.score(logits, moved(batch, logits.device)) if labelled else None
            if score is not None and said is None:
                said = torch.log_softmax(flat(target, mask).float(), -1)
            tally.add(logits, target, mask, score, said)
    return [tally.as_dict() for tally in tallies]


def output(stream: Stream, b: int) -> Tensor:
    """What the model says for one batch; logits of all batches at once would not fit in memory."""
    return stream.head(b, stream.hidden[b])


def moved(batch: Batch, device: torch.device) -> Batch:
    """The batch on a device."""
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}


def classes_of(logits: Tensor, batch: Batch) -> bool:
    """Whether the labels of a batch can be classes of these outputs, one label for every vector."""
    labels = batch.get("labels")
    if labels is None or logits.shape[-1] < 2 or logits.dim() != labels.dim() + 1:
        return False
    return not labels.is_floating_point() and int(labels.max()) < logits.shape[-1]


@dataclass
class Tally:
    """Sums over guard samples for one candidate."""

    divergence: float = 0.0
    error: float = 0.0
    rows: int = 0
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
                self.divergence += float((p.exp() * (p - q)).sum(-1).double().sum())
            self.error += float(relative_error(y, x).sum())
        self.rows += len(a)
        if score:
            self.loss, self.scored = self.loss + score[0], self.scored + score[1]

    def as_dict(self) -> JsonObject:
        """Means over the guard: error, divergence and loss, as far as known, and the one that judges."""
        found = {"guard_error": self.error / self.rows}
        if self.predicts:
            found["guard_divergence"] = self.divergence / self.rows
        if self.scored:
            found["guard_loss"] = self.loss / self.scored
        key = "guard_divergence" if self.predicts else "guard_error"
        return {k: round(v, 6) for k, v in found.items()} | {"judged_by": round(found[key], 6)}
