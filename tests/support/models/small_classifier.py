"""A small BERT that classifies, and how it is scored, for the tests of `leansurgeon heads`."""

from __future__ import annotations

import torch

from leansurgeon import architectures
from leansurgeon.checkpoints.model import Loaded
from leansurgeon.tasks.base import Metric, classification_score


class Rule:
    """Cross-entropy and accuracy of a class."""

    name, head, metric = "rule", "sequence-classification", Metric("accuracy", "accuracy", True, True)

    def score(self, logits, batch, *, label_smoothing=0.0):
        return classification_score(logits, batch["labels"], label_smoothing)


def classifier(**numbers) -> Loaded:
    """A random BERT of 2 layers and width 32, in training mode; `numbers` are those of its config."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, intermediate_size=64, max_position_embeddings=16, **numbers
    )
    model = transformers.BertForSequenceClassification(config).train()
    config = model.config.to_dict() | {"architectures": ["BertForSequenceClassification"]}
    return Loaded(model, architectures.of(config), config, None, None)
