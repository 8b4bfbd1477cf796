"""Sparse prediction: a masked language model computes its head at the hidden tokens only, as Crammed BERT does.

With 15 % of the tokens hidden, 85 % of the logits (as wide as the vocabulary) serve no loss. Here the encoder runs over
all tokens, and transformation, decoder and loss over those that the task lists under "_places". The loss and all
gradients are the same sums over the same terms; the model itself stays as it is, and so does its checkpoint.

Shape letters: B samples, T tokens, N listed places, D width, V vocabulary.
"""

from __future__ import annotations

import torch

from leansurgeon import architectures
from leansurgeon.checkpoints.model import Loaded

PLACES = "_places"

# What a ForMaskedLM does to the encoder's last hidden states, as names of its children in their order: all that is
# declared, the longest first, since the last of ModernBERT's is the whole of Crammed BERT's.
HEADS = sorted({family.masked_head for family in architectures.known().values()} - {()}, key=lambda h: (-len(h), h))


def head_of(model: torch.nn.Module) -> tuple[str, ...] | None:
    """The names that `HEADS` has for this model; None where it is no masked language model that we know."""
    if not type(model).__name__.endswith("ForMaskedLM"):
        return None
    return next((names for names in HEADS if all(hasattr(model, name) for name in names)), None)


def forward(loaded: Loaded, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits (1, N, V) at the places of the batch, for a model with a known head; where it has none, all logits."""
    if PLACES not in batch:
        return loaded.forward(batch)
    inputs = {name: value for name, value in batch.items() if name != "labels" and not name.startswith("_")}
    states_BTD = loaded.model.base_model(**inputs)[0]
    x = states_BTD.flatten(0, 1).index_select(0, batch[PLACES])[None]
    for name in head_of(loaded.model):
        x = getattr(loaded.model, name)(x)
    return x


def scored(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch with the labels that belong to `forward`'s logits: (1, N) where it has places."""
    if PLACES not in batch:
        return batch
    return {**batch, "labels": batch["labels"].flatten().index_select(0, batch[PLACES])[None]}


def dense(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch without places."""
    return {name: value for name, value in batch.items() if name != PLACES}
