"""GLUE (Wang et al., 2018): the eight tasks of the paper's Table 1, each with GLUE's own metrics.

Accuracy adds up over batches and processes. The other metrics are computed at the end from sums that do: a confusion
matrix for F1 and Matthews, and for the correlations of STS-B the prediction of every sample at its own index.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from leansurgeon.errors import UsageError, quote
from leansurgeon.progress import Say
from leansurgeon.reading import tables
from leansurgeon.reading.files import in_home
from leansurgeon.tasks import base, classes, disk_cache, hub
from leansurgeon.tasks.images import places as image_places
from leansurgeon.tasks.text import vocab
from leansurgeon.tasks.text.classification import Rows, TextClassification, join_rows

if TYPE_CHECKING:
    from torch import Tensor

HUB = "hub:nyu-mll/glue"
BY_HAND = "Download its parquet files on another machine and name their folder with the task's option `data`."
_NLI = ("entailment", "not_entailment")
_PAIR = ("sentence1", "sentence2")
_F1 = base.Metric("f1", "F1")
_MATTHEWS = base.Metric("matthews", "Matthews correlation")
_PEARSON = base.Metric("pearson", "Pearson correlation")
_MATCHED = base.Metric("accuracy", "accuracy (matched)")


@dataclass(frozen=True)
class GlueTask:
    """One task of GLUE: its columns, its labels in order (none: a number from 0 to 5), and its metrics.

    `metric` is that for model selection.
    """

    title: str
    texts: tuple[str, ...]
    metric: base.Metric
    labels: tuple[str, ...] = ("0", "1")
    metrics: tuple[str, ...] = ("accuracy",)


KINDS = {
    "cola": GlueTask("CoLA", ("sentence",), _MATTHEWS, metrics=("matthews", "accuracy")),
    "sst2": GlueTask("SST-2", ("sentence",), base.ACCURACY),
    "mrpc": GlueTask("MRPC", _PAIR, _F1, metrics=("f1", "accuracy")),
    "stsb": GlueTask("STS-B", _PAIR, _PEARSON, (), ("pearson", "spearman")),
    "qqp": GlueTask("QQP", ("question1", "question2"), _F1, metrics=("f1", "accuracy")),
    "mnli": GlueTask(
        "MNLI",
        ("premise", "hypothesis"),
        _MATCHED,
        ("entailment", "neutral", "contradiction"),
        ("accuracy", "accuracy_mismatched"),
    ),
    "qnli": GlueTask("QNLI", ("question", "sentence"), base.ACCURACY, _NLI),
    "rte": GlueTask("RTE", _PAIR, base.ACCURACY, _NLI),
}


class Options(base.Options):
    """Options of `glue`.

    `task`: which one. `data`: the hub, or a folder with the hub's parquet files (`cola/train-*.parquet` or
    `cola/train/0000.parquet`, ...) or with other tables of the same names and columns. `class_names`: the classes in
    the order of the model's outputs, if that differs from GLUE's.
    """

    task: Literal["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"]
    data: str = HUB
    class_names: base.Names = None
    seq_len: int = Field(128, ge=4)
    pad: Literal["longest", "max"] = "longest"
    tokenizer: vocab.Choice = "model"
    vocab_size: vocab.Size = None


class Glue(TextClassification):
    """One task of GLUE. STS-B is a regression: one output, squared error, labels from 0 to 5."""

    name = "glue"
    Options = Options
    licence = "as the task's own authors say"

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.kind = KINDS[options.task]
        self.metric, self.objective = self.kind.metric, "class" if self.kind.labels else "score"

    @property
    def _paired(self) -> bool:
        return len(self.kind.texts) == 2

    def prepare(self, cache: Path, model_dir: Path | None, *, workers: int, say: Say) -> None:
        """Read and tokenise the published files of one task into the cache once."""
        o = self.options
        vocab.check_length(o.seq_len, model_dir)
        places = _places(o.data, o.task)
        key = {
            "version": 1,
            "task": o.task,
            "tokenizer": self._tokenizer_key(model_dir),
            "seq_len": o.seq_len,
            "places": {part: list(map(image_places.stamp, paths)) for part, paths in places.items()},
        }

        def build(folder: Path) -> disk_cache.Info:
            parts = {part: _read(paths, self.kind) for part, paths in places.items()}
            count = sum(len(rows.texts) for rows in parts.values())
            say(f"glue {o.task}: tokenising {count:,} rows ({o.tokenizer})")
            evaluation = [rows for part, rows in parts.items() if part != "train"]
            rows = {"train": parts["train"], "eval": join_rows(evaluation)}
            info = {"matched": len(evaluation[0].texts), "labels": list(self.kind.labels)}
            return self._store(folder, rows, model_dir) | info

        self._open(cache, "glue", key, build)
        if self.kind.labels:
            stored = np.arange(len(self.kind.labels))
            self._stored_classes = classes.StoredClasses(self.kind.labels, stored, o.class_names, ordered=True)
        self.source = f"GLUE {self.kind.title} (Wang et al., 2018)"

    def batch(self, split: str, indices: np.ndarray, *, seed: int, epoch: int) -> base.Batch:
        """Return `input_ids` and `attention_mask` (B, T), and `labels` (B,): classes, or scores for STS-B."""
        batch = super().batch(split, indices, seed=seed, epoch=epoch)
        if self.options.task == "mnli" and split == "eval":
            batch |= base.as_tensors(_group=(np.asarray(indices) >= self._info["matched"]).astype(np.int64))
        return batch

    def score(self, logits: Tensor, batch: base.Batch, *, label_smoothing: float = 0.0) -> base.Score:
        """Return cross-entropy, or squared error for STS-B, with the sums for the task's own metrics."""
        import torch

        score = super().score(logits, batch, label_smoothing=label_smoothing)
        if self.options.task != "mnli":
            return score
        if "_group" not in batch:
            return score._replace(extra=None)
        right = (logits.argmax(-1) == batch["labels"]).long()
        group = torch.where(batch["labels"] != base.IGNORED, batch["_group"], base.IGNORED)
        return score._replace(extra=base.confusion(right, group, 2))

    @property
    def extra_sums(self) -> int:
        """Predictions and answers of STS-B, the confusion matrix of tasks with F1 or MCC, else nothing."""
        if self.objective == "score":
            return super().extra_sums
        return 0 if self.kind.metrics == ("accuracy",) else 4

    def metric_value(self, sums: base.Sums) -> base.Metrics:
        """Return the metrics of this task, 0..1 (correlations -1..1; 0 if all predictions are equal)."""
        if self.options.task == "mnli":
            wrong, right = sums.extra.reshape(2, 2).T
            matched, mismatched = right / np.maximum(wrong + right, 1)
            return {"accuracy": float(matched), "accuracy_mismatched": float(mismatched)}
        every = super().metric_value(sums)
        if self.objective == "class" and self.extra_sums:
            from sklearn import metrics

            how = {"y_true": [0, 0, 1, 1], "y_pred": [0, 1, 0, 1], "sample_weight": sums.extra}
            positive = int(self._stored_classes.outputs_of(np.ones(1))[0])
            every["f1"] = float(metrics.f1_score(**how, pos_label=positive, zero_division=0))
            every["matthews"] = float(metrics.matthews_corrcoef(**how))
        return {name: every[name] for name in self.kind.metrics}

    def describe(self) -> base.Description:
        """Return sizes, task, source and licence."""
        matched = {"eval_matched": self._info["matched"]} if self.options.task == "mnli" else {}
        return super().describe() | {"task": self.options.task} | matched


# -- files -----------------------------------------------------------------------------------------


def _places(data: str, task: str) -> dict[str, list[Any]]:
    """Return files (or one hub data set) by part: "train", then the evaluation parts in order."""
    wanted = {"train": "train", "eval": "validation"}
    if task == "mnli":
        wanted = {"train": "train", "matched": "validation_matched", "mismatched": "validation_mismatched"}
    if named := hub.parse(data):
        return {part: [hub.load(named[0], task, word, by_hand=BY_HAND)] for part, word in wanted.items()}
    root = in_home(data).absolute()
    for folder in (root / task, root):
        found = {}
        for path in filter(tables.is_table, sorted((*folder.glob("*"), *folder.glob("*/*")))):
            # validation_matched/0000.parquet, or validation_matched-00000-of-00001.parquet
            said = path.stem.split("-")[0] if path.parent == folder else path.parent.name
            found.setdefault(said, []).append(path)
        if found.keys() >= set(wanted.values()):
            return {part: found[word] for part, word in wanted.items()}
    raise UsageError(f"GLUE {task} is not in {data}: {task}/train-*.parquet is missing.", BY_HAND)


def _read(places: list[Any], kind: GlueTask) -> Rows:
    """Return texts and labels of all rows. Raises UsageError for a text that is none, or a label of another task."""
    texts, labels = [[] for _ in kind.texts], []
    for place in places:
        for where, row in hub.read(place, [*kind.texts, "label"]):
            for column, text in zip(texts, row, strict=False):
                if not isinstance(text, str):
                    raise UsageError(f"{where}: a text is {quote(text)}.")
                column.append(text)
            labels.append(_label(row[-1], kind, where))
    if not labels:
        raise UsageError(f"{places[0] if isinstance(places[0], Path) else 'The data set'}: no rows.")
    kept = np.array(labels, dtype=np.int32 if kind.labels else np.float32)
    return Rows(texts[0], texts[1] if len(texts) > 1 else None, kept)


def _label(value: Any, kind: GlueTask, where: str) -> float | int:
    text = str(value).strip()
    if text in kind.labels:
        return kind.labels.index(text)
    try:
        number = float(text)  # float columns of tables with gaps hold labels as 1.0
    except ValueError:
        number = math.nan
    if not kind.labels:
        if not 0 <= number <= 5:
            raise UsageError(f"{where}: the label {quote(value)} is not a number from 0 to 5.")
        return number
    if not (number.is_integer() and 0 <= number < len(kind.labels)):
        raise UsageError(f"{where}: the label {quote(value)} is none of {', '.join(kind.labels)}.")
    return int(number)
