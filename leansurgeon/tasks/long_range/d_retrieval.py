"""Generalised D-retrieval: how many heads does a task need that retrieves D things at once? Generated here in a second.

A sequence of T random points x_t in R^d has the target y = sum over i of max over t of a_i . x_t, with D directions a_i
that are orthonormal if D <= d. The theory ("Transformers need D heads", setting of its synthetic experiment): h >= D
small heads suffice; fewer need a network that grows like 1/eps^k. The error is normalised, NMSE = MSE / Var(y), because
the maximum over more tokens varies less; the paper reports the minimum over seeds.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from leansurgeon.progress import Say
from leansurgeon.tasks import base, disk_cache

if TYPE_CHECKING:
    from torch import Tensor

_VERSION = 1


class Options(base.Options):
    """`dimension` is D, `length` T, `input_size` d (default D); `seed` is that of the data."""

    dimension: int = Field(4, ge=1)
    length: int = Field(16, ge=1)
    input_size: base.Count = None
    train: int = Field(8_000, ge=2)
    eval: int = Field(2_000, ge=2)
    seed: int = Field(0, ge=0)


class DRetrieval(base.Task):
    """Regression of one number from (T, d) values, judged by the normalised mean squared error.

    Labels are standardised by mean and deviation of the training set, which does not affect the NMSE.
    """

    name = "d-retrieval"
    overrides = {"num_labels": 1}  # noqa: RUF012
    head = "sequence-classification"
    metric = base.Metric("nmse", "NMSE", higher_is_better=False, percent=False)
    Options = Options
    licence = "made by leansurgeon: no rights attached"

    def prepare(self, cache: Path, model_dir: Path | None, *, workers: int, say: Say) -> None:
        """Generate the sequences and their targets once, from the options alone."""
        o = self.options
        self.source = f"generalised D-retrieval, generated: D {o.dimension}, {o.length} tokens, seed {o.seed}"
        key = {"version": _VERSION, **o.model_dump()}

        def build(folder: Path) -> disk_cache.Info:
            size = o.input_size or o.dimension
            rng = np.random.default_rng([o.seed, o.dimension, o.length, size])
            drawn = rng.standard_normal((size, o.dimension))
            if o.dimension <= size:
                drawn = np.linalg.qr(drawn)[0]
            a_Dd = (drawn / np.linalg.norm(drawn, axis=0)).T  # unit vectors
            values, targets = {}, {}
            for split, count in (("train", o.train), ("eval", o.eval)):
                values[split] = rng.standard_normal((count, o.length, size))
                targets[split] = (values[split] @ a_Dd.T).max(axis=1).sum(axis=1)
            mean, deviation = targets["train"].mean(), targets["train"].std()
            for split in base.SPLITS:
                labels = ((targets[split] - mean) / deviation).astype(np.float32)
                np.save(folder / f"{split}-values.npy", values[split].astype(np.float32))
                np.save(folder / f"{split}-labels.npy", labels)
            np.save(folder / "directions.npy", a_Dd)
            return {"sizes": {"train": o.train, "eval": o.eval}, "variance": float(labels.astype(np.float64).var())}

        self._open(cache, "d-retrieval", key, build)

    def batch(self, split: str, indices: np.ndarray, *, seed: int, epoch: int) -> base.Batch:
        """Return `input_values` (B, T, D) and the targets `labels` (B, 1)."""
        rows = self._indices(split, indices)
        values, labels = (self._array(f"{split}-{name}")[rows] for name in ("values", "labels"))
        return base.as_tensors(input_values=values, labels=labels)

    def score(self, logits: Tensor, batch: base.Batch, *, label_smoothing: float = 0.0) -> base.Score:
        """Return squared errors; `label_smoothing` is ignored."""
        import torch

        labels = batch["labels"]
        valid = labels != base.IGNORED
        errors = torch.where(valid, (logits.float().reshape(-1) - labels) ** 2, 0).sum()
        count = valid.sum().float()
        return base.Score(errors, count, errors.detach(), count)

    def metric_value(self, sums: base.Sums) -> base.Metrics:
        """Return the mean squared error over the variance of the evaluation labels; predicting the mean gives 1."""
        mse = sums.metric_sum / max(sums.metric_count, 1)
        return {"nmse": mse / self._info["variance"]}
