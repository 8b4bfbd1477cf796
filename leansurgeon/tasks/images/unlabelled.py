"""Images for a backbone without a head, which learns what its source says of them. Classes play no part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leansurgeon.tasks import base
from leansurgeon.tasks.images.folder import ImageFolder
from leansurgeon.tasks.text.sentences import cosine_score

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class Images(ImageFolder):
    """The images of a folder, with or without class folders; the metric is the cosine to the source's embeddings."""

    name = "images"
    head = "features"
    metric = base.Metric("cosine", "cosine to the source", higher_is_better=True, percent=False)

    def batch(self, split: str, indices: np.ndarray, *, seed: int, epoch: int) -> base.Batch:
        batch = super().batch(split, indices, seed=seed, epoch=epoch)
        return batch | {"labels": batch["labels"] * 0}

    def score(self, logits: Tensor, batch: dict[str, Tensor], *, label_smoothing: float = 0.0) -> base.Score:
        """`logits` are the student's embeddings (B, D), and the teacher's stand in the batch."""
        return cosine_score(logits, batch)

    @property
    def data_classes(self) -> list[str]:
        return []

    @property
    def extra_sums(self) -> int:
        return 0

    def metric_value(self, sums: base.Sums) -> base.Metrics:
        return base.Task.metric_value(self, sums)

    def model_overrides(self) -> base.Overrides:
        return {key: value for key, value in super().model_overrides().items() if key != "num_labels"}
