"""Small real tasks and a small model with the interface of `checkpoints.Loaded`, for the tests of the training room."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from torch import nn

from leansurgeon.tasks.base import Metric, Options, Score, Task, classification_score, token_score
from leansurgeon.training.loop import train
from leansurgeon.training.recipe.schema import TrainingRecipe


class Words(Task):
    """Predict a token from its neighbours; samples have 0 to 7 scored tokens, so micro batches differ in count."""

    name, head = "words", "masked-lm"
    metric = Metric("perplexity", "perplexity", higher_is_better=False, percent=False)
    Options = Options

    def __init__(self, train: int = 64, evaluation: int = 13) -> None:
        super().__init__(Options())
        self._sizes = {"train": train, "eval": evaluation}

    def prepare(self, cache, model_dir, *, workers, say) -> None:
        pass

    def size(self, split: str) -> int:
        return self._sizes[split]

    def batch(self, split, indices, *, seed, epoch):
        rows = [np.random.default_rng([7, split == "train", int(i)]).integers(0, 11, 8) for i in indices]
        ids = torch.from_numpy(np.stack(rows))
        labels = torch.roll(ids, 1, dims=1) % 5
        for row, index in enumerate(indices):
            labels[row, int(index) % 8 :] = -100
        return {"input_ids": ids, "labels": labels}

    def score(self, logits, batch, *, label_smoothing=0.0) -> Score:
        return token_score(logits, batch["labels"], label_smoothing)

    def metric_value(self, sums) -> dict[str, float]:
        return {"perplexity": float(np.exp(sums.metric_sum / sums.metric_count))}

    def model_overrides(self):
        return {}

    def describe(self):
        return {"source": "made up"}


class Dots(Words):
    """Three-way classification of 16 numbers."""

    name, head = "dots", "image-classification"
    metric = Metric("accuracy", "top-1 accuracy", higher_is_better=True, percent=True)

    def batch(self, split, indices, *, seed, epoch):
        rng = [np.random.default_rng([3, split == "train", int(i)]) for i in indices]
        pixels = torch.from_numpy(np.stack([r.standard_normal(16) for r in rng]).astype(np.float32))
        return {"pixel_values": pixels, "labels": pixels[:, :3].argmax(1)}

    def score(self, logits, batch, *, label_smoothing=0.0) -> Score:
        return classification_score(logits, batch["labels"], label_smoothing)

    def metric_value(self, sums) -> dict[str, float]:
        return {"accuracy": sums.metric_sum / sums.metric_count}


class WordModel(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(11, 16), nn.Embedding(8, 16)
        self.norm, self.mix = nn.LayerNorm(16), nn.Linear(16, 16)
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(16, 11)

    def forward(self, ids_BT):
        x = self.wte(ids_BT) + self.wpe.weight
        x = x + self.drop(torch.tanh(self.mix(self.norm(x)).roll(-1, dims=1)))
        return self.head(x)


class StandIn:
    """What `checkpoints.load` gives, as far as training uses it."""

    projections = ("mix",)
    folder = Path("stand-in")

    def __init__(self, model: nn.Module, key: str = "input_ids") -> None:
        self.model, self.key = model, key

    def forward(self, batch):
        return self.model(batch[self.key])

    @property
    def blocks(self):
        return list(getattr(self.model, "blocks", []))

    @property
    def info(self):
        parameters = sum(p.numel() for p in self.model.parameters())
        return {"source": "stand-in", "shape": {}, "parameters": parameters, "parts": {}, "surgery": None}

    def save(self, folder: Path) -> None:
        torch.save(self.model.state_dict(), folder / "weights.pt")


def word_model(seed: int = 0, dropout: float = 0.0) -> StandIn:
    torch.manual_seed(seed)
    return StandIn(WordModel(dropout))


def dot_model(seed: int = 0) -> StandIn:
    torch.manual_seed(seed)
    return StandIn(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)), "pixel_values")


def recipe(**train) -> TrainingRecipe:
    """Eight steps of 16 samples, everything logged at every step; keyword arguments change keys of `train`."""
    settings = {
        "duration": "8st",
        "batch": 16,
        "optim": {"lr": 1e-2, "weight_decay": 0.1},
        "schedule": {"name": "cosine", "warmup": 0.25},
        "eval": {"every": "4st", "batch": 4},
        "log_every": 1,
    }
    return TrainingRecipe(name="stand-in", task={"name": "digits"}, train=settings | train, measure=None)


def run_training(folder, *, loaded=None, task=None, say=lambda text: None, resume="never", replace=False, **settings):
    """Train on the CPU, in FOLDER/run, the stand-in of words where nothing else is given."""
    options = {"loaded": loaded or word_model(), "task": task or Words(), "say": say}
    return train(recipe(**settings), folder, folder / "run", cpu=True, resume=resume, replace=replace, **options)


def trained(folder, **options):
    """The summary of `run_training`, and the rows of its metrics.jsonl."""
    summary = run_training(folder, **options).as_dict()
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return summary, rows


def losses(rows, kind="train"):
    return [row["loss"] for row in rows if row["type"] == kind]
