"""Score a model with some heads switched off, sample by sample.

`Labelled`: the loss of the task (for language models the mean over the sample's tokens, so that long samples do not
weigh more), and for classifiers whether the prediction is right.

`OutputScorer`: for models whose output predicts nothing in the data (sentence encoders such as MiniLM, towers, a
classifier for other classes). The distance of the output z from itself has no gradient, so it cannot rank heads; its
curvature can. The loss of a masked model is 1 - cos(z, z of the whole model), z pooled over real tokens. The importance
is computed from v . z / |z| with one Gaussian v per sample: |v . J| is on average sqrt(2 / pi) |J|, with J the change
of the unit vector z / |z| with the head's mask, and 1 - cos is |J|^2 / 2 to second order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from leansurgeon.checkpoints.model import Loaded
from leansurgeon.checkpoints.proof.prove import of_values
from leansurgeon.errors import Diverged
from leansurgeon.measure.costs.precision import at_rest
from leansurgeon.measure.data.batches import Batch, on
from leansurgeon.measure.heads.sites import Site, switch_off_heads
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.reading.pooling import Pooling
from leansurgeon.tasks import Task

TEXT = ("causal-lm", "masked-lm", "seq2seq")


@dataclass(frozen=True)
class Labelled:
    """Scores by the task's loss; `task` needs `head` and `score(logits, batch)`."""

    loaded: Loaded
    task: Task

    @property
    def says(self) -> str:
        """What is measured, in words."""
        return "loss of a token, mean over a sample" if self.task.head in TEXT else "loss of a sample"

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of a batch."""
        return self.loaded.forward(batch)

    def losses(self, output: Tensor, batch: Batch, reference: Tensor | None = None) -> Tensor:
        """Return the losses, (B,) fp32; 0 for a sample with nothing to score."""
        rows = len(batch["labels"])
        losses = []
        for i in range(rows):
            one = {k: v[i : i + 1] if isinstance(v, Tensor) and len(v) == rows else v for k, v in batch.items()}
            score = self.task.score(output[i : i + 1], one)
            losses.append(score.loss_sum / score.loss_count.clamp(min=1))
        return torch.stack(losses)

    def slopes(self, output: Tensor, batch: Batch, number: int) -> Tensor:
        """Return (B,) the values whose gradient gives the importance."""
        return self.losses(output, batch)

    def right(self, output: Tensor, batch: Batch) -> Tensor | None:
        """Return whether each prediction is right, (B,); None unless labels are classes of samples."""
        labels = batch["labels"]
        if labels.dim() != 1 or labels.is_floating_point() or output.dim() != 2:
            return None
        return output.argmax(-1) == labels


@dataclass(frozen=True)
class OutputScorer:
    """Scores by the distance to the whole model's output."""

    loaded: Loaded
    seed: int = 0
    pooling: Pooling | None = None  # of another model; None: its own

    says = "1 - cosine of the output with that of the whole model"

    def forward(self, batch: Batch) -> Tensor:
        """Return (B, values): the model's output, pooled over real tokens, as unit vectors."""
        pooling = self.pooling or self.loaded.pooling
        output = pooling.pool(self.loaded.forward(batch), batch.get("attention_mask"))
        wide = output.to(torch.promote_types(output.dtype, torch.float32))
        return torch.nn.functional.normalize(wide, dim=-1)

    def losses(self, output: Tensor, batch: Batch, reference: Tensor | None = None) -> Tensor:
        """Return (B,) 1 - cos between unit vectors and those of the whole model."""
        return 1 - (output * reference.to(output)).sum(-1)

    def slopes(self, output: Tensor, batch: Batch, number: int) -> Tensor:
        """Return (B,) the product of each unit vector with one random direction."""
        draws = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        return (output * torch.randn(output.shape, generator=draws).to(output)).sum(-1)

    def right(self, output: Tensor, batch: Batch) -> None:
        """Return None: there are no right answers."""
        return None


@dataclass(frozen=True)
class Scores:
    """Scores of one model on all samples, each (S,). `right` if there are right answers; `scores` (Spearman's
    correlation, or micro and macro F1) if labels are scores or several classes.
    """

    losses: ndarray
    right: ndarray | None
    scores: Mapping[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Mean loss over samples."""
        return float(self.losses.mean())

    @property
    def accuracy(self) -> float | None:
        """Share of right answers, if there are any."""
        return None if self.right is None else float(self.right.mean())

    def as_dict(self) -> JsonObject:
        """Return loss, and accuracy or scores if any."""
        scores = {"scores": dict(self.scores)} if self.scores else {}
        return {"loss": self.loss} | ({} if self.right is None else {"accuracy": self.accuracy}) | scores


@dataclass
class HeadScorer:
    """A model, its sites and the samples to score it on, with any of its heads switched off."""

    judge: Labelled | OutputScorer
    sites: list[Site]
    batches: Sequence[Batch]
    known: dict[bytes, Scores] = field(default_factory=dict, repr=False)
    references: list[Tensor] = field(default_factory=list, repr=False)

    @property
    def model(self) -> torch.nn.Module:
        """The module in which heads are switched off."""
        return self.judge.loaded.model

    @property
    def whole(self) -> Scores:
        """Scores with all heads."""
        return self.scores(np.ones(sum(site.heads for site in self.sites), bool))

    def scores(self, keep: ndarray) -> Scores:
        """Return the scores without the heads where `keep` (all heads,) is false. Raises `Diverged` for a non-finite
        loss.
        """
        if known := self.known.get(keep.tobytes()):
            return known
        device = next(self.model.parameters()).device
        losses, right, valued = [], [], []
        with torch.no_grad(), at_rest(self.model, device):
            if isinstance(self.judge, OutputScorer) and not self.references:
                self.references = [self.judge.forward(on(batch, device)) for batch in self.batches]
            for i, batch in enumerate(self.batches):
                batch = on(batch, device)
                with switch_off_heads(self.model, self.sites, keep):
                    output = self.judge.forward(batch)
                losses.append(self.judge.losses(output, batch, self.references[i] if self.references else None).cpu())
                right.append(self.judge.right(output, batch))
                if isinstance(self.judge, Labelled) and batch["labels"].is_floating_point():
                    valued += torch.stack([output.float(), batch["labels"].view_as(output)], dim=1).tolist()
        values = torch.cat(losses).double().numpy()
        if not np.isfinite(values).all():
            raise Diverged("The loss of a held-out sample is NaN or infinite, so heads cannot be judged by it.")
        answers = None if right[0] is None else torch.cat(right).cpu().numpy()
        self.known[keep.tobytes()] = made = Scores(values, answers, of_values(valued) if valued else {})
        return made


def judge_of(loaded: Loaded, task: Task | None, seed: int = 0) -> Labelled | OutputScorer:
    """Return a judge by the task's loss if the model predicts its labels (otherwise `Calibration.task` is None)."""
    return OutputScorer(loaded, seed) if task is None else Labelled(loaded, task)
