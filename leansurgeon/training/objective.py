"""The model and its task as one module; and sparse prediction, where a masked language model computes its head at the
masked tokens only, as in Crammed BERT.

With 15 % of the tokens masked, 85 % of the logits (as wide as the vocabulary) contribute to no loss. So the encoder
runs over all tokens, and transformation, decoder and loss over those that the task lists under "_places". The loss and
all gradients are the same sums over the same terms; the model and its checkpoint stay as they are.

Shape letters: B samples, T tokens, N listed positions, D width, V vocabulary.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from leansurgeon import architectures
from leansurgeon.checkpoints.model import Loaded
from leansurgeon.measure.costs.precision import autocast
from leansurgeon.training.data_loader import Batch

if TYPE_CHECKING:
    from leansurgeon.tasks import Score, Task
    from leansurgeon.training.recipe.schema import Train


class Objective(nn.Module):
    """A model and its task as one module: batch -> `Score`.

    DDP and torch.compile wrap this module and leave the model itself untouched, so that it can be exported as it is.
    The loss is computed inside, so that only four numbers, and not fp32 copies of all logits, leave the forward. Label
    smoothing and distillation apply in training mode only; evaluation uses the task's loss alone. A masked language
    model predicts at masked tokens only (`predict`), if its head is known and `sparse_prediction` is on.
    """

    def __init__(
        self,
        loaded: Loaded,
        task: Task,
        train: Train,
        distillation: Any = None,
    ) -> None:
        super().__init__()
        self.model = loaded.model
        self.loaded, self.score = loaded, task.score
        models = [loaded.model] + ([distillation.teacher.model] if distillation else [])
        self._sparse = train.sparse_prediction and all(head_of(model) for model in models)
        self.precision, self._recomputes = train.precision, train.activation_checkpointing
        self._smoothing = train.label_smoothing
        self._distillation = [distillation]  # in a list, so that the teacher is not a submodule
        self._features = task.head == "features"  # no labels: evaluation needs the teacher too

    @property
    def teacher(self) -> Any:
        """Return the `Distillation` that it learns from, if any."""
        return self._distillation[0]

    def forward(self, batch: Batch) -> Score:
        batch = self.as_model_takes(batch)
        with autocast(self.precision, batch["labels"].device.type, recomputes=self._recomputes):
            if self._features:
                return self.teacher.of_features(self.loaded, batch, self.training)
            if not self.training:
                return self.score(predict(self.loaded, batch), labels_of_places(batch))
            with self.teacher.teaching(batch) if self.teacher else nullcontext() as taught:
                logits = predict(self.loaded, batch)
            score = self.score(logits, labels_of_places(batch), label_smoothing=self._smoothing)
            return score if taught is None else self.teacher.add_to_score(score, logits, taught, batch)

    def as_model_takes(self, batch: Batch) -> Batch:
        """Return the batch as the model takes it: without the list of positions if it predicts everywhere."""
        return batch if self._sparse else without_places(batch)


class TeacherObjective(nn.Module):
    """The teacher of a `student` on the student's task, scored like the student: batch -> `Score`."""

    def __init__(self, student: Objective) -> None:
        super().__init__()
        self._student = [student]  # in a list, so that it is not a submodule

    def forward(self, batch: Batch) -> Score:
        student = self._student[0]
        batch = student.as_model_takes(batch)
        with autocast(student.precision, batch["labels"].device.type):
            if student._features:
                return student.teacher.of_itself(batch)
            return student.score(student.teacher.answers(batch), labels_of_places(batch))


PLACES = "_places"

# What a ForMaskedLM applies to the encoder's last hidden states, as names of its children in order: all declared ones,
# the longest first, since the last of ModernBERT's is the whole of Crammed BERT's.
HEADS = sorted(
    {family.masked_head for family in architectures.load_families().values()} - {()}, key=lambda h: (-len(h), h)
)


def head_of(model: torch.nn.Module) -> tuple[str, ...] | None:
    """Return the names in `HEADS` that fit this model; None if it is not a masked language model that we know."""
    if not type(model).__name__.endswith("ForMaskedLM"):
        return None
    return next((names for names in HEADS if all(hasattr(model, name) for name in names)), None)


def predict(loaded: Loaded, batch: Batch) -> Tensor:
    """Return logits (1, N, V) at the batch's listed positions, for a model with a known head; all logits if it lists
    none.
    """
    if PLACES not in batch:
        return loaded.forward(batch)
    inputs = {name: value for name, value in batch.items() if name != "labels" and not name.startswith("_")}
    states_BTD = loaded.model.base_model(**inputs)[0]
    x = states_BTD.flatten(0, 1).index_select(0, batch[PLACES])[None]
    for name in head_of(loaded.model):
        x = getattr(loaded.model, name)(x)
    return x


def labels_of_places(batch: Batch) -> Batch:
    """Return the batch with the labels that match `predict`'s logits: (1, N) if it lists positions."""
    if PLACES not in batch:
        return batch
    return {**batch, "labels": batch["labels"].flatten().index_select(0, batch[PLACES])[None]}


def without_places(batch: Batch) -> Batch:
    """Return the batch without the list of positions."""
    return {name: value for name, value in batch.items() if name != PLACES}
