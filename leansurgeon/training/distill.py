"""Knowledge distillation from a teacher: its logits, its hidden states layer by layer or, for models without a head,
its embeddings.

    loss = task + logits * T^2 * KL(teacher || student) + hidden * mean squared error of hidden states

A model without a head has no logits. Its task is to reproduce the teacher's embedding of every sample, and its states
after the last norm count among the hidden ones.

Hinton et al., 2015 (the factor T^2 keeps gradients of the same size at any temperature T). A student's layer learns the
teacher's state where the next kept layer begins, so it also replaces the layers dropped behind it. All terms are sums
over what is scored, so they mean the same on any number of processes and micro batches.

Shape letters: B samples, T tokens, C classes or vocabulary, D width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leansurgeon.checkpoints import whereabouts
from leansurgeon.checkpoints.kind import LANGUAGE
from leansurgeon.checkpoints.model import Loaded, load
from leansurgeon.checkpoints.record import Origin
from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import UsageError
from leansurgeon.measure.data import images
from leansurgeon.tasks import Score, Task
from leansurgeon.tasks.base import TARGET
from leansurgeon.tasks.wide_loss import sum_over_rows
from leansurgeon.training import objective
from leansurgeon.training.data_loader import Batch
from leansurgeon.training.recipe import teacher as teaching
from leansurgeon.training.recipe.schema import Distill, Train
from leansurgeon.training.regularize import leading_parameters

_IGNORED = -100


def of_recipe(
    train: Train, loaded: Loaded, task: Task, model_dir: Path, device: torch.device, *, sharing: bool = False
) -> Distillation | None:
    """Return the distillation that the recipe asks for, or None. `sharing` says whether processes share the weights.

    Raises `UsageError` if the task has no labels and the recipe names no teacher.
    """
    if train.distill is None and task.head == "features":
        raise UsageError(
            f"Task '{task.name}' has no labels: the model must learn from a teacher.",
            "Name one: --set 'train.distill={teacher: source, logits: 0, hidden: 1}'.",
        )
    if train.distill is None:
        return None
    made = Distillation(train.distill, loaded, task, model_dir, device)
    if train.dropout == 0 and not (sharing or train.compile or train.drop_path):
        made.common = CommonBlocks(loaded, made.teacher)
    if train.precision != "fp32":
        halve_matrices(made.teacher.model, torch.bfloat16 if train.precision == "bf16" else torch.float16)
    return made


class Distillation:
    """The teacher of `student`, in evaluation mode and without gradients, and the terms that it adds to the loss."""

    def __init__(self, settings: Distill, student: Loaded, task: Task, model_dir: Path, device: torch.device) -> None:
        self.settings, self.task = settings, task
        self.teacher, self._outputs, self._seen = load_teacher(settings, model_dir, student, task)
        self.teacher.model.to(device).eval().requires_grad_(False)
        if settings.logits and task.head == "features":
            raise UsageError(
                f"{type(student.model).__name__} learns embeddings, and train.distill.logits is {settings.logits:g}.",
                "A model without a head has no logits: --set train.distill.logits=0.",
            )
        widths = [one.architecture.shape(one.config).stages[-1].width for one in (student, self.teacher)]
        if task.head == "features" and widths[0] != widths[1]:
            raise UsageError(
                f"The teacher {settings.teacher} gives embeddings of {widths[1]} numbers, the model of {widths[0]}.",
                teaching.HINT,
            )
        wanted = targets(student, self.teacher, settings.teacher) if settings.hidden else []
        self._teacher_states = taps(self.teacher, wanted)
        self._student_states = taps(student) if settings.hidden else []
        self.common: CommonBlocks | None = None

    def of_copy(self, student: Loaded) -> Distillation:
        """Return the same teacher for a copy of the student."""
        other = copy.copy(self)
        other._student_states = taps(student) if self.settings.hidden else []
        other.common = None
        return other

    @contextmanager
    def teaching(self, batch: Batch) -> Iterator[Tensor]:
        """Yield the teacher's logits, where they are learned, or else its last hidden states of this batch. Run the
        student inside the context, so that blocks which both have in common run once.
        """
        with self.common or nullcontext():
            with torch.no_grad():
                logits = self.settings.logits and self.task.head != "features"
                taught = self.answers(batch) if logits else self.teacher.features(self._seen(batch))
            yield taught

    def add_to_score(self, score: Score, logits: Tensor, taught: Tensor, batch: Batch) -> Score:
        """Add the teacher's terms to the score's `loss_sum`; metrics stay as they are.

        Student and teacher must just have computed `logits` and `taught` for this batch.
        """
        loss, labels = score.loss_sum, objective.labels_of_places(batch)["labels"]
        if self.settings.logits:
            if getattr(self.task, "objective", "class") != "class":  # independent outputs: squared error of each
                error = (logits.float() - taught.float()).pow(2).mean(-1).sum()
            else:
                if self.task.head == "causal-lm":  # position t predicts token t + 1; shifted logits would be copies
                    labels = F.pad(labels[:, 1:], (0, 1), value=_IGNORED)
                if self.task.head in LANGUAGE:  # vocabularies may be padded to different sizes; drop the padding
                    size = min(logits.shape[-1], taught.shape[-1])
                    logits, taught = logits[..., :size], taught[..., :size]
                counted = scored_places(labels, logits.dim())
                error = divergence(logits, taught, counted, self.settings.temperature)
            loss = loss + self.settings.logits * error
        if self.settings.hidden:
            loss = loss + self.settings.hidden * self._of_states(batch)
        return score._replace(loss_sum=loss)

    def answers(self, batch: Batch) -> Tensor:
        """Return the teacher's logits, in the order of the student's."""
        taught = objective.predict(self.teacher, self._seen(batch))
        return taught if self._outputs is None else taught[..., self._outputs]

    def of_features(self, student: Loaded, batch: Batch, learning: bool) -> Score:
        """Score the student's embeddings against the teacher's; while `learning`, add the hidden-state terms."""
        with self.teaching(batch) as target:
            state, mask = student.features(batch), self.task.token_mask(batch)
        pool = self.teacher.pooling.pool
        score = self.task.score(pool(state, mask), batch | {TARGET: pool(target, mask)})
        if not self.settings.hidden:
            return score
        # take the states in evaluation too: see `_Tap`
        error = self._of_states(batch, [self._error(state, target, mask)])
        return score._replace(loss_sum=score.loss_sum + self.settings.hidden * error) if learning else score

    def of_itself(self, batch: Batch) -> Score:
        """Score the teacher's embeddings against themselves."""
        pooled = self.teacher.pooling.pool(self.teacher.features(self._seen(batch)), self.task.token_mask(batch))
        return self.task.score(pooled, batch | {TARGET: pooled})

    def _of_states(self, batch: Batch, more: Sequence[Tensor] = ()) -> Tensor:
        """Sum over samples of (scored positions) x (mean squared error over tokens, width and layers); `more` are
        errors of further states, (B,) each.
        """
        labels = batch["labels"]
        if self.task.head == "causal-lm":
            labels = labels[:, 1:]
        dimensions = labels.dim() + (not labels.dtype.is_floating_point)
        weights_B = scored_places(labels, dimensions).reshape(len(labels), -1).sum(1).float()
        mask = self.task.token_mask(batch)
        pairs = zip(self._student_states, self._teacher_states, strict=True)
        errors = [*(self._error(a.take(), b.take(), mask) for a, b in pairs), *more]
        return (torch.stack(errors).mean(0) * weights_B).sum()

    def _error(self, state: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
        """Return the (B,) errors of a hidden state, relative to the size of the target if the settings ask for it."""
        error = state_error(state, target, mask)
        if not self.settings.relative:
            return error
        return error / state_error(torch.zeros_like(target), target, mask).clamp(min=1e-12)


class CommonBlocks:
    """Runs the first blocks of a student, if they are frozen and equal to its teacher's, only once.

    Inside the context, while the student trains, these blocks return what the teacher's returned for the same batch.
    """

    def __init__(self, student: Loaded, teacher: Loaded) -> None:
        count = count_common(student, teacher)
        self._pairs = list(zip(student.blocks[:count], teacher.blocks[:count], strict=True))
        self._outputs: dict[nn.Module, Any] = {}
        self._undo = ExitStack()

    def __enter__(self) -> None:
        for ours, theirs in self._pairs:
            self._undo.callback(theirs.register_forward_hook(partial(self._note, ours)).remove)
            self._undo.enter_context(mock.patch.object(ours, "forward", partial(self._forward, ours, ours.forward)))

    def __exit__(self, *error: object) -> None:
        self._undo.close()
        self._outputs.clear()

    def _note(self, ours: nn.Module, theirs: nn.Module, inputs: Any, output: Any) -> None:
        self._outputs[ours] = output

    def _forward(self, block: nn.Module, forward: Callable[..., Any], *inputs: Any, **more: Any) -> Any:
        # Inputs with a gradient (positions that all blocks share) belong to the student alone.
        learned = any(isinstance(one, Tensor) and one.requires_grad for one in (*inputs, *more.values()))
        if block.training and not learned and block in self._outputs:
            return self._outputs.pop(block)
        return forward(*inputs, **more)


def count_common(student: Loaded, teacher: Loaded) -> int:
    """Count the first blocks that are frozen and bit for bit equal, provided the embeddings are too."""

    def equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
        return len(ours) == len(theirs) and all(
            not a.requires_grad and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.cpu(), b.cpu())
            for a, b in zip(ours, theirs, strict=True)
        )

    sides = [
        [leading_parameters(one), *([*block.parameters(), *block.buffers()] for block in one.blocks)]
        for one in (student, teacher)
    ]
    common = [*takewhile(lambda pair: equal(*pair), zip(*sides, strict=False))]
    return max(0, len(common) - 1)


@torch.no_grad()
def halve_matrices(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the linear layers of a frozen model to the dtype that autocast would cast them to in every pass. What shares
    a weight with one keeps its own dtype.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            module.weight = nn.Parameter(module.weight.to(dtype), requires_grad=False)
            if module.bias is not None:
                module.bias = nn.Parameter(module.bias.to(dtype), requires_grad=False)


def divergence(logits: Tensor, taught: Tensor, counted: Tensor, temperature: float = 1.0) -> Tensor:
    """Return T^2 times the sum of KL(teacher || student) in nats over the positions `counted` (...); logits are (...,
    C). Only the student's logits get a gradient.
    """
    taught_NC, counted_N = taught.flatten(0, -2), counted.flatten()

    def part_divergence(rows: Tensor, part: slice) -> Tensor:
        student = F.log_softmax(rows / temperature, dim=-1)
        teacher = F.log_softmax(taught_NC[part].float() / temperature, dim=-1)
        each = (teacher.exp() * (teacher - student)).sum(-1)
        # Selecting rows by the mask would synchronize with the GPU. `where` also drops NaN where nothing counts.
        return torch.where(counted_N[part], each, 0).sum()

    return temperature**2 * sum_over_rows(part_divergence, logits.flatten(0, -2))


def scored_places(labels: Tensor, dimensions: int) -> Tensor:
    """Return which positions of logits with `dimensions` dimensions the task scores: (B,) or (B, T) bool."""
    if labels.dim() == dimensions:  # soft labels
        return labels.sum(-1) > 0
    return labels != _IGNORED


def state_error(state: Tensor, target: Tensor, mask_BT: Tensor | None) -> Tensor:
    """Return the mean squared error of every sample, (B,), over width and real tokens; states are (B, T, D) or (B, ...,
    D).
    """
    if state.shape != target.shape:
        raise UsageError(
            f"A hidden state of the student is {tuple(state.shape)} and its teacher's {tuple(target.shape)}.",
            "Use train.distill.hidden=0 with this teacher.",
        )
    error = (state.float() - target.float()).pow(2).flatten(2).mean(-1) if state.dim() > 2 else (state - target) ** 2
    if mask_BT is None or mask_BT.shape != error.shape:
        return error.flatten(1).mean(1)
    return (error * mask_BT).sum(1) / mask_BT.sum(1).clamp(min=1)


class _Tap:
    """Keeps the last output of a block until it is taken. Of several tensors, it keeps the first that has the `width`
    (TNT also returns its pixels).
    """

    def __init__(self, block: nn.Module, width: int) -> None:
        self._state: Tensor | None = None
        self.width = width
        block.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: Any, output: Any) -> None:
        parts = [part for part in output if isinstance(part, Tensor)] if isinstance(output, tuple) else [output]
        last = (part for part in parts if part.shape[-1] == self.width)
        self._state = next(last, next((part for part in parts if self.width in part.shape[1:]), parts[0]))

    def take(self) -> Tensor:
        state, self._state = self._state, None
        assert state is not None, "the block did not run"
        return state


def taps(loaded: Loaded, layers: Sequence[int] | None = None) -> list[_Tap]:
    """Hook the outputs of a model's blocks: of all, or of `layers`."""
    stages = loaded.architecture.shape(loaded.config).stages
    widths, modules = [stage.width for stage in stages for _ in range(stage.depth)], loaded.blocks
    return [_Tap(modules[i], widths[i]) for i in (range(len(modules)) if layers is None else layers)]


def targets(student: Loaded, teacher: Loaded, name: str) -> list[int]:
    """Return, for every layer of the student, the teacher's layer whose output it learns: the last before the next kept
    layer, within its stage.

    Raises `UsageError` if surgery.json holds no layer map for this teacher.
    """
    depths = [stage.depth for stage in teacher.architecture.shape(teacher.config).stages]
    count = sum(stage.depth for stage in student.architecture.shape(student.config).stages)
    kept = list(student.surgery.plan.layers) if student.surgery else []
    if len(kept) != count and count == sum(depths):
        kept = list(range(count))
    if len(kept) != count or any(layer >= sum(depths) for layer in kept):
        raise UsageError(
            f"surgery.json says for {len(kept)} layers where they come from; student and teacher have {count} "
            f"and {sum(depths)}.",
            f"Hidden states can be learned from the model that this one was cut from; {name} is a different model.",
        )
    return last_of(kept, depths)


def last_of(kept: Sequence[int], depths: Sequence[int]) -> list[int]:
    """Return the last layer that each kept one replaces: `[0, 3]` of stages `[6]` -> `[2, 5]`."""
    ends = list(accumulate(depths))
    following = [*kept[1:], ends[-1]]
    return [
        min(after, next(end for end in ends if end > here)) - 1 for here, after in zip(kept, following, strict=True)
    ]


def load_teacher(
    settings: Distill, model_dir: Path, student: Loaded, task: Task
) -> tuple[Loaded, list[int] | None, Callable[[Batch], Batch]]:
    """Load the teacher unchanged, with the outputs that are the student's (`check_teacher`) and a function that
    converts the student's batches.

    Raises `UsageError` if the teacher is missing or untrained, or takes other inputs or predicts other things than the
    student.
    """
    name, surgery = settings.teacher, student.surgery
    if own := name == "source":
        if surgery is None:
            raise UsageError(f"{model_dir} holds no surgery.json, so its source is not known.", teaching.HINT)
        name = place_of(surgery.source)
    source = teaching.open_teacher(name)
    logits = settings.logits > 0 and task.head != "features"
    classes = getattr(task.options, "class_names", None) or task.data_classes or ()
    outputs = teaching.check_teacher(source, task, classes, student.config, logits=logits, own=own)
    tower = surgery.tower if surgery else None  # the same for both
    teacher = load(source.folder, None if logits else "features", tower=tower)
    teacher.source = source  # keeps a converted source's temporary folder alive
    return teacher, outputs, make_restandardise(source, task)


def make_restandardise(source: Source, task: Task) -> Callable[[Batch], Batch]:
    """Return a function that converts images from the student's normalization to that of the teacher's own
    processor.
    """
    given = [getattr(task.options, key, None) for key in ("mean", "std")]
    options = images.folder_options(source) if all(given) else {}
    wanted = [options.get(key) for key in ("mean", "std")]
    if None in wanted or wanted == given:
        return lambda batch: batch
    (mean, std), (new_mean, new_std) = (
        [torch.tensor(value).view(-1, 1, 1) for value in pair] for pair in (given, wanted)
    )

    def restandardise(batch: Batch) -> Batch:
        pixels = batch["pixel_values"]
        scale, shift = (value.to(pixels) for value in (std / new_std, (mean - new_mean) / new_std))
        return batch | {"pixel_values": pixels * scale + shift}

    return restandardise


def place_of(origin: Origin) -> str:
    """Return a name or path that opens the model that this one was cut from. Raises `UsageError` if it is missing or
    has changed.
    """
    if origin.kind != "folder" or not origin.sha256:
        return origin.name
    place = whereabouts.find(origin)
    if place is None:
        raise UsageError(
            f"The source {origin.name} is not on this machine, or has changed since the cut.", teaching.HINT
        )
    return str(place)
