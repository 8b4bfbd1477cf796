"""GLUE (Wang et al., 2018): the eight tasks of the paper's Table 1, each with GLUE's own metrics.

Accuracy adds up over batches and processes. The other metrics are computed at the end from sums that do: a confusion
matrix for F1 and Matthews, and for the correlations of STS-B the prediction of every sample at its own index.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from leansurgeon.errors import UsageError, quote
from leansurgeon.progress import Say
from leansurgeon.reading import files, tables
from leansurgeon.reading.files import in_home
from leansurgeon.tasks import base, classes, disk_cache, hub
from leansurgeon.tasks.images import places as image_places
from leansurgeon.tasks.text import files as text_files
from leansurgeon.tasks.text import vocab
from leansurgeon.tasks.text.classification import Rows, TextClassification, join_rows

if TYPE_CHECKING:
    from torch import Tensor

HUB = "hub:nyu-mll/glue"
BY_HAND = (
    "Download its folder from there on another machine, or the GLUE distribution from gluebenchmark.com/tasks, and "
    "name it with the task's option `data`."
)
_IDS = "dev_ids.tsv"  # ends the name of GLUE's list of MRPC rows
_NLI = ("entailment", "not_entailment")
_F1 = base.Metric("f1", "F1")
_MATTHEWS = base.Metric("matthews", "Matthews correlation")
_PEARSON = base.Metric("pearson", "Pearson correlation")
_MATCHED = base.Metric("accuracy", "accuracy (matched)")


@dataclass(frozen=True)
class GlueTask:
    """One task of GLUE.

    Its folder in the distribution, its columns on the hub and in the distribution's files (indices for files without a
    header), its labels in order (none: a number from 0 to 5), and the metric for model selection.
    """

    folder: str
    texts: tuple[str, ...]
    metric: base.Metric
    labels: tuple[str, ...] = ("0", "1")
    tsv: tuple[str | int, ...] = ()  # texts and label, if their names differ there
    metrics: tuple[str, ...] = ("accuracy",)


KINDS = {
    "cola": GlueTask("CoLA", ("sentence",), _MATTHEWS, tsv=(3, 1), metrics=("matthews", "accuracy")),
    "sst2": GlueTask("SST-2", ("sentence",), base.ACCURACY),
    "mrpc": GlueTask(
        "MRPC",
        ("sentence1", "sentence2"),
        _F1,
        tsv=("#1 String", "#2 String", "Quality"),
        metrics=("f1", "accuracy"),
    ),
    "stsb": GlueTask(
        "STS-B", ("sentence1", "sentence2"), _PEARSON, (), ("sentence1", "sentence2", "score"), ("pearson", "spearman")
    ),
    "qqp": GlueTask(
        "QQP",
        ("question1", "question2"),
        _F1,
        tsv=("question1", "question2", "is_duplicate"),
        metrics=("f1", "accuracy"),
    ),
    "mnli": GlueTask(
        "MNLI",
        ("premise", "hypothesis"),
        _MATCHED,
        ("entailment", "neutral", "contradiction"),
        ("sentence1", "sentence2", "gold_label"),
        ("accuracy", "accuracy_mismatched"),
    ),
    "qnli": GlueTask("QNLI", ("question", "sentence"), base.ACCURACY, _NLI),
    "rte": GlueTask("RTE", ("sentence1", "sentence2"), base.ACCURACY, _NLI),
}


class Options(base.Options):
    """Options of `glue`.

    `task`: which one. `data`: the folder of the GLUE distribution (`CoLA/train.tsv`, ...), a folder with the hub's
    parquet files (`cola/train-*.parquet` or `cola/train/0000.parquet`, ...) or jsonl, csv or tsv files with the hub's
    columns, or the hub. MRPC without GLUE's own files is msr_paraphrase_train.txt, evaluated on the rows that GLUE's
    mrpc_dev_ids.tsv beside it lists, or on its _test.txt. `class_names`: the classes in the order of the model's
    outputs, if that differs from GLUE's.
    """

    task: Literal["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"]
    data: str = HUB
    class_names: list[str] | None = Field(None, min_length=2)
    seq_len: int = Field(128, ge=4)
    pad: Literal["longest", "max"] = "longest"
    tokenizer: vocab.Choice = "model"
    vocab_size: int | None = Field(None, ge=16)


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
            parts = {}
            left_out = 0  # lines that lack fields: the distribution's QQP has some
            for part, paths in places.items():
                texts = [[] for _ in self.kind.texts]
                labels = []
                for where, fields in _fields(paths, self.kind, part):
                    if fields is None:
                        left_out += 1
                        continue
                    for column, text in zip(texts, fields, strict=False):
                        if not isinstance(text, str):
                            raise UsageError(f"{where}: a text is {quote(text)}.")
                        column.append(text)
                    labels.append(_label(fields[-1], self.kind, where))
                if not labels:
                    raise UsageError(f"{paths[0] if isinstance(paths[0], Path) else 'The data set'}: no rows.")
                kept = np.array(labels, dtype=np.int32 if self.kind.labels else np.float32)
                parts[part] = Rows(texts[0], texts[1] if len(texts) > 1 else None, kept)
            count = sum(len(rows.texts) for rows in parts.values())
            say(f"glue {o.task}: tokenising {count:,} rows ({o.tokenizer})")
            evaluation = [rows for part, rows in parts.items() if part != "train"]
            rows = {"train": parts["train"], "eval": join_rows(evaluation)}
            return self._store(folder, rows, model_dir) | {
                "left_out": left_out,
                "matched": len(evaluation[0].texts),
                "labels": list(self.kind.labels),
            }

        self._open(cache, "glue", key, build)
        if self.kind.labels:
            stored = np.arange(len(self.kind.labels))
            self._stored_classes = classes.StoredClasses(self.kind.labels, stored, o.class_names, ordered=True)
        self.source = f"GLUE {self.kind.folder} (Wang et al., 2018)"

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
        """Return sizes, task, source and licence, and the number of omitted lines."""
        told = super().describe() | {"task": self.options.task}
        if self.options.task == "mnli":
            told["eval_matched"] = self._info["matched"]
        return told | ({"lines_left_out": self._info["left_out"]} if self._info["left_out"] else {})


# -- files -----------------------------------------------------------------------------------------


def _places(data: str, task: str) -> dict[str, list[Any]]:
    """Return files (or one hub data set) by part: "train", then the evaluation parts in order."""
    wanted = {"train": ("train",), "eval": ("dev", "validation")}
    if task == "mnli":
        wanted = {
            "train": ("train",),
            "matched": ("dev_matched", "validation_matched"),
            "mismatched": ("dev_mismatched", "validation_mismatched"),
        }
    if named := hub.parse(data):
        return {part: [hub.load(named[0], task, words[-1], by_hand=BY_HAND)] for part, words in wanted.items()}
    root = in_home(data).absolute()
    for folder in (root / KINDS[task].folder, root / task, root):
        found = {}
        for path in sorted((*folder.glob("*"), *folder.glob("*/*"))):
            # validation_matched/0000.parquet, or dev_matched-00000-of-00001.parquet: "dev" must not match dev_matched.
            said = path.stem.split("-")[0].split(".")[0] if path.parent == folder else path.parent.name
            if tables.is_table(path):
                found.setdefault(said, []).append(path)
            elif task == "mrpc" and path.stem.startswith("msr_paraphrase_"):
                found.setdefault(path.stem, []).append(path)
        ids = next(folder.glob(f"*{_IDS}"), None)
        if ids and "msr_paraphrase_train" in found and "train" not in found:
            return {part: [found["msr_paraphrase_train"][0], ids] for part in wanted}
        for named in (wanted, {"train": ("msr_paraphrase_train",), "eval": ("msr_paraphrase_test",)}):
            places = {part: [path for word in words for path in found.get(word, ())] for part, words in named.items()}
            if all(places.values()):
                return places
    raise UsageError(
        f"GLUE {task} is not in {data}: {KINDS[task].folder}/train.tsv or {task}/train-*.parquet is missing.",
        BY_HAND,
    )


def _fields(places: list[Any], kind: GlueTask, part: str) -> Iterator[tuple[str, list[Any] | None]]:
    """Yield (file and row, texts and label) of every row; None for a line that lacks a field."""
    columns = [*kind.texts, "label"]
    if isinstance(places[-1], Path) and places[-1].name.endswith(_IDS):
        file, ids = places  # GLUE lists the rows of MRPC's training file that are for evaluation
        listed = {tuple(line.split()) for line in files.read_text(ids, text_files.LARGEST).splitlines()}
        for where, fields in _tsv(file, replace(kind, tsv=(*kind.tsv, "#1 ID", "#2 ID"))):
            if fields is None or (tuple(fields[-2:]) in listed) == (part == "eval"):
                yield where, fields and fields[:-2]
        return
    for place in places:
        if not isinstance(place, Path):
            yield from ((f"row {number}", row) for number, row in hub.rows(place, columns, "GLUE"))
        elif place.suffix.lower() in (".tsv", ".txt"):
            yield from _tsv(place, kind)
        else:
            yield from ((f"{place}, row {number}", row) for number, row in tables.read(place, columns))


def _tsv(path: Path, kind: GlueTask) -> Iterator[tuple[str, list[Any] | None]]:
    """Read a file of the distribution: tab-separated, with literal quotation marks."""
    lines = files.read_text(path, text_files.LARGEST, encoding="utf-8-sig").split("\n")
    rows = [line.rstrip("\r").split("\t") for line in lines]
    hub_names = [*kind.texts, "label"]
    if kind.tsv and isinstance(kind.tsv[0], int) and not set(hub_names) <= set(rows[0]):
        first, columns = 0, list(kind.tsv)
    else:
        names = hub_names if set(hub_names) <= set(rows[0]) else list(kind.tsv) or hub_names
        missing = [name for name in names if name not in rows[0]]
        if missing:
            raise UsageError(f"{path} has no column '{missing[0]}'.", f"Columns: {', '.join(rows[0])}.")
        first, columns = 1, [rows[0].index(name) for name in names]
    for number, row in enumerate(rows[first:], start=first + 1):
        if row != [""]:
            complete = len(row) > max(columns)
            yield f"{path}, line {number}", [row[place] for place in columns] if complete else None


def _label(value: Any, kind: GlueTask, where: str) -> float | int:
    text = str(value).strip()
    if not kind.labels:
        try:
            score = float(text)
        except ValueError:
            score = math.nan
        if not 0 <= score <= 5:
            raise UsageError(f"{where}: the label {quote(value)} is not a number from 0 to 5.")
        return score
    if text in kind.labels:
        return kind.labels.index(text)
    try:
        number = float(text)  # float columns of tables with gaps hold labels as 1.0
    except (ValueError, OverflowError):
        number = math.nan
    if not (number.is_integer() and 0 <= number < len(kind.labels)):
        raise UsageError(f"{where}: the label {quote(value)} is none of {', '.join(kind.labels)}.")
    return int(number)
