"""One optimizer step: forward, backward, reduce, clip, update. Nothing in here waits for the device.

The loss of a step is the sum over everything that was scored, divided by how much was scored, over all micro batches
and all processes together: 1 process or 8, one micro batch or 16, give the same optimisation even where token counts
differ.

Two exceptions wait: fp16 (its scaler reads whether a gradient was infinite) and `nan: skip`, which decides at every
step whether to take it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from leansurgeon.training.data import order, sparse
from leansurgeon.training.data.feed import Batch
from leansurgeon.training.processes import engine, shards
from leansurgeon.training.update.distill import FEATURES
from leansurgeon.training.update.optimizer import set_lr
from leansurgeon.training.update.pace import Pace

if TYPE_CHECKING:
    from accelerate import Accelerator

    from leansurgeon.checkpoints.model import Loaded
    from leansurgeon.tasks import Score, Task
    from leansurgeon.training.plan import Plan
    from leansurgeon.training.recipe.settings import Train
    from leansurgeon.training.update.averaging import Average
    from leansurgeon.training.update.distill import Distillation
    from leansurgeon.training.update.mixing import Mixing


class Scored(nn.Module):
    """A model and its task as one module: batch -> `Score`.

    DDP and torch.compile wrap this module and leave the model itself untouched, so that it can be exported as it is.
    The loss is computed inside, so that only four numbers, and not fp32 copies of all logits, leave the forward.
    Label smoothing and distillation are for training mode; evaluation knows the task's loss alone. A masked
    language model predicts at hidden tokens only (`sparse`), where its head is known and `sparse_prediction` is wanted.
    """

    def __init__(
        self,
        loaded: Loaded,
        task: Task,
        train: Train,
        distillation: Distillation | None = None,
    ) -> None:
        super().__init__()
        self.model = loaded.model
        self.loaded, self.score = loaded, task.score
        models = [loaded.model] + ([distillation.teacher.model] if distillation else [])
        self._sparse = train.sparse_prediction and all(sparse.head_of(model) for model in models)
        self.precision = train.precision
        self._smoothing = {"label_smoothing": train.label_smoothing} if train.label_smoothing else {}
        self._distillation = [distillation]  # in a list: a teacher is no part of this module
        self._features = task.head == FEATURES  # no labels: the teacher is asked in evaluation, too

    @property
    def teacher(self) -> Distillation | None:
        """What it learns from, if anything."""
        return self._distillation[0]

    def forward(self, batch: Batch) -> Score:
        learning = self.training
        distillation = self._distillation[0] if learning else None
        batch = self.seen(batch)
        with engine.autocast(self.precision, batch["labels"].device):
            if self._features:
                return self._distillation[0].of_features(self.loaded, batch, learning)
            logits = sparse.forward(self.loaded, batch)
            score = self.score(logits, sparse.scored(batch), **(self._smoothing if learning else {}))
            return score if distillation is None else distillation.added(score, logits, batch)

    def seen(self, batch: Batch) -> Batch:
        """The batch as the model takes it: without a list of places where it predicts everywhere."""
        return batch if self._sparse else sparse.dense(batch)


class Taught(nn.Module):
    """The teacher of a `student` on the student's task, judged as this is: batch -> `Score`."""

    def __init__(self, student: Scored) -> None:
        super().__init__()
        self._student = [student]  # in a list: it is no part of this module

    def forward(self, batch: Batch) -> Score:
        student = self._student[0]
        batch = student.seen(batch)
        with engine.autocast(student.precision, batch["labels"].device):
            return student.score(student.teacher.answers(batch), sparse.scored(batch))


def _norm(parameters: list[nn.Parameter]) -> torch.Tensor:
    """Norm of all gradients together, which are left as they are."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)


@dataclass
class Trainer:
    """What a step needs. `wrapped` is `scored` behind DDP where there are several processes, else the same object;
    under FSDP2 `scored` and its parameters are in parts, and `rehearsal` makes a copy that needs no other process.
    """

    accelerator: Accelerator
    scored: nn.Module
    wrapped: nn.Module
    optimizer: Any
    parameters: list[nn.Parameter]
    plan: Plan
    seed: int
    scaler: Any = None
    average: Average | None = None
    mixing: Mixing | None = None
    rehearsal: Callable[[], nn.Module] | None = None
    pace: Pace = field(init=False)

    def __post_init__(self) -> None:
        self.pace = Pace(self.plan)

    def lr(self, step: int) -> float:
        return self.plan.lr(self.pace.place(step))

    def step(self, step: int, batches: list[Batch]) -> torch.Tensor:
        """Train on the micro batches of optimizer step `step`.

        Returns loss sum, scored count (both over all processes) and gradient norm before clipping as one tensor `(3,)`
        on the device.
        """
        plan = self.plan
        place = self.pace.place(step)
        set_lr(self.optimizer, plan.lr(place), plan.momentum(place))
        # Dropout is a function of (seed, step, process) too: no generator state has to be carried from step to step.
        engine.seed_generators(
            self.accelerator.device, order.dropout_seed(self.seed, step, self.accelerator.process_index)
        )
        alone = plan.processes == 1 and len(batches) == 1
        sums = self._gradients(step, batches, alone)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if not alone:
            # DDP and FSDP2 average over processes, hence the factor `processes`.
            gradients = [shards.local(parameter.grad) for parameter in self.parameters if parameter.grad is not None]
            torch._foreach_mul_(gradients, plan.batch * plan.processes / sums[1].clamp(min=1))
        # The norm tells whether the gradients are numbers, so it is wanted without clipping too. The host does not
        # wait for it.
        clip = plan.train.clip_grad
        norm = self.accelerator.clip_grad_norm_(self.parameters, clip) if clip > 0 else _norm(self.parameters)
        result = torch.cat([sums, shards.whole(norm).reshape(1)])
        self._update(step, result)
        self.optimizer.zero_grad(set_to_none=True)
        return result

    def _gradients(self, step: int, batches: list[Batch], alone: bool) -> torch.Tensor:
        """Forward and backward of all micro batches; loss sum and count `(2,)` over all processes."""
        sums = None
        for batch, sync in zip(batches, self._syncs(len(batches)), strict=True):
            if self.mixing is not None:
                batch = self.mixing(batch, self.plan.position(step) // self.plan.epoch_samples, step)
            with sync:
                score = self.wrapped(batch)
                # Alone, the count is known before backward. Otherwise a constant keeps the gradients at a usual size
                # until the true count of the whole step is known.
                loss = score.loss_sum / (score.loss_count.clamp(min=1) if alone else self.plan.batch)
                self.accelerator.backward(self.scaler.scale(loss) if self.scaler is not None else loss)
            part = torch.stack([score.loss_sum.detach(), score.loss_count])
            sums = part if sums is None else sums + part
        return engine.all_reduced(sums, self.accelerator)

    def _update(self, step: int, result: torch.Tensor) -> None:
        """Take the step, unless something is not finite and the recipe, or fp16, goes on without it: then the average
        does not take in these weights again.
        """
        # The same numbers are seen on every process, so all of them decide alike.
        looks = self.plan.train.nan == "skip" or self.scaler is not None
        taken = not looks or bool(torch.isfinite(result).all())
        if self.scaler is not None:
            if taken:
                self.scaler.step(self.optimizer)
            self.scaler.update()
        elif taken:
            self.optimizer.step()
        if self.average is not None and taken:
            self.average.update(self.scored.model, step + 1)

    def _syncs(self, count: int) -> Iterator[Any]:
        """A context per micro batch. DDP exchanges gradients with the last one only; FSDP2 with each, since whole
        gradients in between would take the memory that it is there to save.
        """
        always = shards.are_in(self.wrapped)
        for index in range(count):
            yield nullcontext() if always or index == count - 1 else self.accelerator.no_sync(self.wrapped)
