"""The interface of every task, and the scores that tasks share (samples, tokens).

Shape letters: B samples, T tokens, C classes, V vocabulary. A label of -100 marks a sample or token that is not
counted: the padding of a batch's last samples on several processes, the unmasked tokens of a masked language model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
from numpy import ndarray
from pydantic import BaseModel, ConfigDict, Field

from leansurgeon.errors import UsageError
from leansurgeon.progress import Say
from leansurgeon.tasks import classes, disk_cache

if TYPE_CHECKING:
    from torch import Tensor

    from leansurgeon.tasks.splits import Split

IGNORED = -100
SPLITS = ("train", "eval")
TARGET = "_target"  # (B, D) in a batch: the teacher's embeddings
CONFUSED = 100  # no confusion matrix is kept for more classes

Batch: TypeAlias = "dict[str, Tensor]"  # model inputs by name, "labels", and "_..." keys that only `score` reads
Overrides: TypeAlias = dict[str, Any]  # config keys of a model
Description: TypeAlias = dict[str, Any]  # the data's entry in `summary.json`
Metrics: TypeAlias = dict[str, float]
Count: TypeAlias = Annotated[int | None, Field(ge=1)]  # a number in the options, from 1
Names: TypeAlias = Annotated[list[str] | None, Field(min_length=2)]  # class names in the options


@dataclass(frozen=True)
class Metric:
    """The metric of a task. `label` is its name in papers; with `percent`, 0.5 is shown as 50."""

    key: str
    label: str
    higher_is_better: bool = True
    percent: bool = True

    def format_value(self, value: float) -> str:
        """Format a value for progress lines: `97.20 %`, `31.42`."""
        return f"{100 * value:.2f} %" if self.percent else f"{value:#.4g}"


ACCURACY = Metric("accuracy", "accuracy")
TOP_1 = replace(ACCURACY, label="top-1 accuracy")


class Score(NamedTuple):
    """Sums over the scored samples or tokens, 0-dimensional fp32 tensors on the logits' device.

    They can be added over batches and processes. `extra` (E,) holds further sums, equally many for every batch of a
    split, from which the task computes metrics that are no means over samples (`Task.metric_value`): a confusion
    matrix, or predictions, each at its own index. None if the task needs none.
    """

    loss_sum: Tensor
    loss_count: Tensor
    metric_sum: Tensor
    metric_count: Tensor
    extra: Tensor | None = None


class Sums(NamedTuple):
    """The summed `Score`s of a whole split as plain numbers; `extra` (E,) is float64."""

    loss_sum: float
    loss_count: float
    metric_sum: float
    metric_count: float
    extra: ndarray | None = None


class Options(BaseModel):
    """Base class of the options of a task in a recipe; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Task(ABC):
    """Data, objective and metric of one benchmark.

    Create it with `leansurgeon.tasks.make`. Call `prepare` before `size`, `batch` or `model_overrides`. A prepared task
    can be pickled (arrays stay on disk and are reopened as memory maps) and used in another process.
    """

    name: ClassVar[str]
    head: ClassVar[str]
    metric: ClassVar[Metric]
    Options: ClassVar[type[Options]]
    overrides: ClassVar[Overrides] = {}  # `model_overrides`, if they are the same for all data
    source = ""  # where the data comes from
    licence = "as the files' owner says"
    was_read: str | None = None  # what the user is told about the data that was read; None for the task's own data
    held_out: str | None = None  # the same for the split; None if the task brings its own
    draws_globally = False  # whether `batch` seeds global generators (`chance.seed_each`)

    def __init__(self, options: Options) -> None:
        self.options: Any = options
        self._folder: Path | None = None
        self._info: dict[str, Any] = {}
        self._arrays: dict[str, ndarray] = {}
        self._stored_classes: classes.StoredClasses | None = None

    @abstractmethod
    def prepare(self, cache: Path, model_dir: Path | None, *, workers: int, say: Say) -> None:
        """Read, generate or tokenise the data into `cache`; a second call finds it there.

        Call it in one process, before the others. `model_dir` is the model's folder (for its tokenizer), `workers` the
        number of processes that may be used, and `say` takes a line of progress.
        """

    @abstractmethod
    def batch(self, split: str, indices: ndarray, *, seed: int, epoch: int) -> Batch:
        """Return the samples `indices` (B,) of a split ("train" or "eval") as model inputs and "labels".

        Names that begin with "_" are for `score`, not for the model. The function is pure: randomness depends on (seed,
        epoch, index) only, and in "eval" nothing depends on seed or epoch.
        """

    def score(self, logits: Tensor, batch: Batch, *, label_smoothing: float = 0.0) -> Score:
        """Return loss and metric sums of one batch; by default those of a classification.

        loss_sum / loss_count is the mean loss (over samples or, in language models, tokens). Nothing here synchronises
        with the device. In image classification "labels" may be (B, C) class shares, as made by mixup. Regression
        ignores `label_smoothing`.
        """
        return classification_score(logits, batch["labels"], label_smoothing)

    def model_overrides(self) -> Overrides:
        """Return the config keys that a fresh head, or a preset, needs for this data."""
        return dict(self.overrides)

    def describe(self) -> Description:
        """Return sizes, particulars, source and licence of the data, for `summary.json`."""
        sizes = {f"{split}_samples": self.size(split) for split in dict.fromkeys((*SPLITS, *self.splits))}
        split = {"split": self.identity} if self.held_out else {}
        return {**sizes, **split, **self._particulars(), "source": self.source, "licence": self.licence}

    def size(self, split: str) -> int:
        """Return the number of samples of a split."""
        split = self._check_split(split)
        return int(self._info["sizes"][split])

    @property
    def data_classes(self) -> list[str]:
        """The data's own class names in its order; empty if it has none, or if they are the task's."""
        return self._stored_classes.labels if self._stored_classes else []

    @property
    def orders_classes(self) -> bool:
        """Whether the data defines an order of its classes other than alphabetical."""
        return bool(self._stored_classes and self._stored_classes.ordered)

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits: "train", "eval", and "test" if there is a third one, to be read at the end."""
        return tuple(self._info.get("sizes", SPLITS))

    @property
    def identity(self) -> dict[str, str]:
        """The split's rule and a digest of the samples of each side (`splits.Split.identity`).

        For a split that the task brings, the task's name and that of its prepared data.
        """
        theirs = {"rule": f"task {self.name}", "train": str(self.prepared_as), "test": str(self.prepared_as)}
        return dict(self._info.get("split", theirs))

    def metric_value(self, sums: Sums) -> Metrics:
        """Return all metrics of a whole split by name, including `metric.key`, from its summed scores."""
        return {self.metric.key: sums.metric_sum / max(sums.metric_count, 1)}

    @property
    def extra_sums(self) -> int:
        """Length of `Score.extra` in evaluation; every process must know it, even one without a batch."""
        return 0

    def lengths(self, split: str) -> ndarray | None:
        """Return the (N,) numbers of tokens of a split's samples; None if all are equal, or there are no tokens."""
        return None

    def token_mask(self, batch: Batch) -> Tensor | None:
        """Return (B, T) bool, true for real tokens; None if all are real."""
        mask = batch.get("attention_mask")
        return None if mask is None else mask.bool()

    def tokenizer(self) -> Any | None:
        """Return a `transformers` tokenizer to save beside the trained model, or None."""
        return None

    # -- for the tasks themselves ----------------------------------------------------------------------------

    def _particulars(self) -> Description:
        """Return the part of `describe` that is specific to this task."""
        return {}

    def _open(self, cache: Path, name: str, key: dict[str, Any], build: Callable[[Path], disk_cache.Info]) -> None:
        """Open a cache entry as this task's data; build it if it is missing (`disk_cache.entry`)."""
        self._folder = disk_cache.entry(cache, name, key, build)
        self._info, self._arrays = disk_cache.read_info(self._folder), {}
        self.was_read, self.held_out = map(self._info.get, ("was_read", "held_out"))

    @property
    def prepared_as(self) -> str | None:
        """Name of the open cache entry, with a digest of everything that determines its content."""
        return self._folder.name if self._folder is not None else None

    def _array(self, name: str) -> ndarray:
        """Return the array `name`.npy of the cache entry, memory-mapped and opened once per process."""
        if self._folder is None:
            raise RuntimeError(f"task '{self.name}' is used before prepare()")
        if name not in self._arrays:
            self._arrays[name] = np.asarray(np.load(self._folder / f"{name}.npy", mmap_mode="r", allow_pickle=False))
        return self._arrays[name]

    def _check_split(self, split: str) -> str:
        if self._folder is None:
            raise RuntimeError(f"task '{self.name}' is used before prepare()")
        if split not in self.splits:
            raise UsageError(f"Task '{self.name}' has no split '{split}'.", f"Splits: {', '.join(self.splits)}.")
        return split

    def _indices(self, split: str, indices: ndarray) -> ndarray:
        """Return the indices as an array. Raises IndexError if the split has no such sample."""
        indices, size = np.asarray(indices), self.size(split)
        if len(indices) and not 0 <= indices.min() <= indices.max() < size:
            raise IndexError(f"split '{split}' of task '{self.name}' has {size} samples")
        return indices

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arrays": {}}


class Shortened(Task):
    """A task whose options `train_samples` and `eval_samples` limit a split to its first samples."""

    def size(self, split: str) -> int:
        """Return the number of samples of a split, at most what the options allow."""
        return min(super().size(split), self._limit(split) or 1 << 62)

    def _limit(self, split: str) -> int | None:
        return {"train": self.options.train_samples, "eval": self.options.eval_samples}.get(split)

    def _check_limits(self, called: str, kind: str) -> None:
        for split in SPLITS:
            limit, there = self._limit(split), super().size(split)
            if limit is not None and limit > there:
                raise UsageError(f"{called} holds {there:,} {kind} where {split}_samples asks for {limit:,}.")


class Embedded(Task):
    """A task without labels: the target of a sample is a teacher's embedding of it (`training.distill`).

    The metric is the mean cosine of both.
    """

    head = "features"
    metric = Metric("cosine", "cosine to the source", percent=False)
    data_classes: list[str] = []  # noqa: RUF012
    extra_sums = 0
    metric_value = Task.metric_value

    def score(self, logits: Tensor, batch: Batch, *, label_smoothing: float = 0.0) -> Score:
        """Score the student's embeddings `logits` (B, D) against the teacher's in the batch."""
        return cosine_score(logits, batch)


def as_tensors(**arrays: ndarray) -> Batch:
    """Return the arrays as a batch of tensors that share their memory."""
    import torch

    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def describe_split(split: Split, kind: str, labels: Sequence[str] | None = None) -> disk_cache.Info:
    """Return what a cache entry stores about a split of samples of this kind."""
    return {"split": split.identity(), "held_out": split.sentence(kind, labels)}


def classification_score(
    logits_BC: Tensor, labels: Tensor, label_smoothing: float = 0.0, *, top: int | None = None
) -> Score:
    """Return the cross-entropy sum and the number of correct answers.

    `labels` are (B,) classes, where -100 is not counted, or (B, C) class shares, where a row of zeros is not counted
    and the largest share is the correct answer. With `top`, `extra` (1,) is the number of samples whose class is among
    the `top` best.
    """
    import torch
    from torch.nn import functional as F

    logits_BC = logits_BC.float()
    soft = labels.dim() == 2
    if soft:
        valid_B = labels.sum(-1) > 0
        losses_B = F.cross_entropy(logits_BC, labels.float(), reduction="none", label_smoothing=label_smoothing)
        loss_sum = torch.where(valid_B, losses_B, 0).sum()
    else:
        valid_B = labels != IGNORED
        loss_sum = F.cross_entropy(
            logits_BC, labels, reduction="sum", ignore_index=IGNORED, label_smoothing=label_smoothing
        )
    count = valid_B.sum().float()
    with torch.no_grad():
        answers_B = labels.argmax(-1) if soft else labels
        right = ((logits_BC.argmax(-1) == answers_B) & valid_B).sum().float()
        if top is None:
            return Score(loss_sum, count, right, count)
        best_BK = logits_BC.topk(min(top, logits_BC.shape[-1]), dim=-1).indices
        among = ((best_BK == answers_B[:, None]).any(-1) & valid_B).sum().float()
    return Score(loss_sum, count, right, count, among.reshape(1))


def cosine_score(embeddings: Tensor, batch: Batch) -> Score:
    """Sum 1 - cosine (the loss) and the cosine over samples, for (B, D) embeddings and `batch[TARGET]`."""
    import torch
    from torch.nn import functional as F

    cosines_B = F.cosine_similarity(embeddings.float(), batch[TARGET].float(), dim=-1)
    valid_B = batch["labels"] != IGNORED
    count = valid_B.sum().float()
    kept_B = torch.where(valid_B, cosines_B, 0)
    return Score(count - kept_B.sum(), count, kept_B.detach().sum(), count)


def confusion(predicted_B: Tensor, labels_B: Tensor, classes: int) -> Tensor:
    """Return (classes * classes,) fp32 counts of class i (row) predicted as class j (column); -100 is not counted."""
    import torch

    valid_B = labels_B != IGNORED
    cells_B = torch.where(valid_B, labels_B, 0) * classes + predicted_B
    return torch.zeros(classes * classes, device=labels_B.device).index_add_(0, cells_B, valid_B.float())


def cells_of(classes: int) -> int:
    """Return the length of the confusion matrix; 0 for more than `CONFUSED` classes, for which none is kept."""
    return classes * classes if classes <= CONFUSED else 0


def of_confusion(cells: ndarray) -> Metrics:
    """Return macro F1 over the present classes, and the share of the largest one; empty for an empty matrix."""
    if not cells.any():
        return {}
    cells_CC = cells.reshape(round(len(cells) ** 0.5), -1)
    real_C = cells_CC.sum(1)
    f1_C = 2 * cells_CC.diagonal() / np.maximum(cells_CC.sum(0) + real_C, 1)
    return {"macro_f1": float(f1_C[real_C > 0].mean()), "largest_class": float(real_C.max() / real_C.sum())}


def token_score(logits_BTV: Tensor, labels_BT: Tensor, label_smoothing: float = 0.0) -> Score:
    """Sum the cross-entropy of tokens whose label is not -100: as loss (smoothed), and unsmoothed for perplexity."""
    from torch.nn import functional as F

    from leansurgeon.tasks.wide_loss import sum_over_rows

    logits_NV, labels_N = logits_BTV.flatten(0, 1), labels_BT.flatten()
    count = (labels_N != IGNORED).sum().float()

    def entropy(smoothing: float) -> Callable[[Tensor, slice], Tensor]:
        how = {"reduction": "sum", "ignore_index": IGNORED, "label_smoothing": smoothing}
        return lambda rows, part: F.cross_entropy(rows, labels_N[part], **how)

    loss_sum = sum_over_rows(entropy(label_smoothing), logits_NV)
    plain = sum_over_rows(entropy(0.0), logits_NV.detach()) if label_smoothing else loss_sum.detach()
    return Score(loss_sum, count, plain, count)
