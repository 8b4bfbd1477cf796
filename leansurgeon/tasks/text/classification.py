"""Classification of texts, or of pairs of texts, from csv, tsv, jsonl or parquet files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy import ndarray
from pydantic import Field

from leansurgeon.errors import UsageError, quote
from leansurgeon.progress import Say, track
from leansurgeon.reading import tables
from leansurgeon.tasks import base, classes, disk_cache, splits, user_data
from leansurgeon.tasks.text import files as text_files
from leansurgeon.tasks.text import vocab

if TYPE_CHECKING:
    from torch import Tensor


METRICS = {
    "class": base.ACCURACY,
    "several": base.Metric("micro_f1", "micro F1"),
    "score": base.Metric("spearman", "Spearman's correlation", percent=False),
}


class Options(base.Options):
    """Options of the task.

    `train`, `eval` and `test`: files or globs. Splits that are not named are cut from `train` by content, unless
    `hold_out: false` (then `eval` is required).

    Texts are cut at `seq_len` tokens, and padded to the longest of the batch or, with `pad: max`, to seq_len.
    `class_names`: the data's classes in the order of the model's outputs, if that differs from the data's. `objective`:
    one class per text (cross-entropy), several (binary cross-entropy per output), or a score (squared error, for 0 and
    1 binary cross-entropy); auto: by the labels.
    """

    train: str | list[str]
    eval: str | list[str] | None = None
    test: str | list[str] | None = None
    hold_out: bool = True
    text: str = "text"
    text_pair: str | None = None
    label: str | list[str] = "label"
    class_names: base.Names = None
    objective: Literal["auto", "class", "several", "score"] = "auto"
    seq_len: int = Field(128, ge=4)
    pad: Literal["longest", "max"] = "longest"
    tokenizer: vocab.Choice = "model"
    vocab_size: vocab.Size = None


class Rows(NamedTuple):
    """Texts of a split, the second texts of pairs, and (N,) labels as numbers, or as they were read."""

    texts: list[str]
    pairs: list[str] | None
    labels: ndarray | list[Any]


class TextClassification(vocab.Tokenized):
    """Classification of texts by the labels of the training rows, or several classes per text, or a score.

    Classes are numbered as a parquet file says, or else in numerical or alphabetical order.
    """

    name = "text-classification"
    head = "sequence-classification"
    metric = METRICS["class"]
    Options = Options
    objective = "class"

    def prepare(self, cache: Path, model_dir: Path | None, *, workers: int, say: Say) -> None:
        """Read, split and tokenise the tables into the cache once."""
        o = self.options
        vocab.check_length(o.seq_len, model_dir)
        columns = [o.label] if isinstance(o.label, str) else o.label
        named = {"train": o.train, "eval": o.eval, "test": o.test}
        files = {side: text_files.find(names) for side, names in named.items() if names is not None}
        called = text_files.short_names([path for paths in files.values() for path in paths])
        key = {
            # 2 stopped at rows without a label, 3 held out at random, 4 accepted objects as labels, 5 sorted all
            # classes
            "version": 6,
            "tokenizer": [self._tokenizer_key(model_dir), self._pad_of(model_dir)],
            "columns": [o.text, o.text_pair, o.label, o.objective],
            "seq_len": o.seq_len,
            "split": splits.RULE if o.hold_out else None,
            **{side: [disk_cache.file_key(path) for path in paths] for side, paths in files.items()},
        }

        def build(folder: Path) -> disk_cache.Info:
            read = {side: _read(paths, o) for side, paths in files.items()}
            rows, found = {side: part for side, (part, _) in read.items()}, {}
            counted = {what: sum(of_side[what] for _, of_side in read.values()) for what in read["train"][1]}
            if o.hold_out:
                rows, found = _split(rows)
            elif "eval" not in rows:
                raise UsageError("hold_out is false, and no rows to evaluate on are named.", "Name them: task.eval.")
            kinds = {type(label) for part in rows.values() for label in part.labels}
            if len(kinds) > 1:
                raise UsageError(
                    f"{', '.join(called)}: the labels are numbers with decimals, or several of a text, in some alone."
                )
            objective = "several" if tuple in kinds else "score" if float in kinds else "class"
            names = _label_names(rows, o.label) if objective != "score" else []
            said = tables.class_names(files["train"][0], o.label) if isinstance(o.label, str) else None
            if ordered := said is not None and {*names} <= {*said}:
                names = [name for name in said if name in names]
            say(f"{self.name}: tokenising {sum(len(part.texts) for part in rows.values()):,} texts ({o.tokenizer})")
            numbered = {}  # with class numbers (N,), marks (N, C) or scores (N,)
            for split, part in rows.items():
                if objective == "score":
                    labels = np.array(part.labels, dtype=np.float32)
                elif objective == "class":
                    labels = np.array([names.index(label) for label in part.labels], dtype=np.int32)
                else:
                    labels = np.array([[name in label for name in names] for label in part.labels], dtype=np.uint8)
                numbered[split] = part._replace(labels=labels)
            info = self._store(folder, numbered, model_dir) | found
            info |= {"labels": names, "objective": objective, "ordered": ordered}
            roles = [("text", list(filter(None, [o.text, o.text_pair]))), ("label", columns)]
            there = tables.columns(files["train"][0])
            labels = Counter(chain.from_iterable(_in_words(part.labels) for part, _ in read.values()))
            return info | {"was_read": user_data.tell(called, counted, roles, there, labels, (info["cut"], o.seq_len))}

        self._open(cache, "texts", key, build)
        self.objective = self._info["objective"]
        self.metric = METRICS[self.objective]
        if self.objective != "score":
            stored = np.arange(len(self._info["labels"]))
            if self.objective == "class":
                stored = np.concatenate([self._array(f"{split}-labels") for split in self._info["sizes"]])
            self._stored_classes = classes.StoredClasses(
                self._info["labels"], stored, o.class_names, ordered=self._info["ordered"]
            )
        self.source = user_data.name_some(called)

    @property
    def _paired(self) -> bool:
        """Whether a sample is a pair of texts."""
        return self.options.text_pair is not None

    def _tokenizer_key(self, model_dir: Path | None) -> dict[str, Any]:
        """Return the base key, with what is added after single texts, if anything."""
        key, kind = super()._tokenizer_key(model_dir), self.options.tokenizer
        if self._paired or kind in vocab.KINDS[1:] or kind.startswith(vocab.HUB):
            return key
        second = vocab.second_text(vocab.make(kind, None, (), model_dir))
        return key if second is None else key | {"second": second}

    def _pad_of(self, model_dir: Path | None) -> int | None:
        """Return the pad token of the model's config, if it has one and the model's own tokenizer is used."""
        own = model_dir if self.options.tokenizer == "model" else None
        return vocab.read_setting(own, "config.json", "pad_token_id")

    def _store(self, folder: Path, rows: Mapping[str, Rows], model_dir: Path | None) -> disk_cache.Info:
        """Write tokens and labels of every split; return what `batch` needs to know about them."""
        tokenizer = self._make_tokenizer(folder, rows["train"].texts + (rows["train"].pairs or []), model_dir)
        own = model_dir if self.options.tokenizer == "model" else None
        most = vocab.read_setting(own, "config.json", "vocab_size")
        reads = own if self.head == "sequence-classification" else None
        second = None if self._paired else vocab.second_text(tokenizer, reads)
        dtype, length, cut, marked = vocab.dtype_for(vocab.count_ids(tokenizer)), self.options.seq_len, 0, False
        for split, (texts, pairs, labels) in rows.items():
            pairs = pairs if second is None else [second] * len(texts)
            typed = pairs is not None and "token_type_ids" in tokenizer.model_input_names
            tokens = disk_cache.ArrayWriter(folder / f"{split}-tokens.npy", dtype)
            types, lengths = disk_cache.ArrayWriter(folder / f"{split}-types.npy", np.uint8), []
            # The library tokenises a batch on all cores.
            for first in track(range(0, len(texts), 1000), "tokenising", "x 1000 texts/s"):
                part = slice(first, first + 1000)
                encoded = tokenizer(
                    texts[part],
                    pairs[part] if pairs else None,
                    truncation=True,
                    max_length=length,
                    return_token_type_ids=typed,
                    return_attention_mask=False,
                )
                for ids in encoded["input_ids"]:
                    tokens.append(ids)
                    lengths.append(len(ids))
                if full := [first + i for i, ids in enumerate(encoded["input_ids"]) if len(ids) == length]:
                    others = [pairs[i] for i in full] if pairs else None
                    whole = tokenizer([texts[i] for i in full], others, verbose=False)["input_ids"]
                    cut += sum(len(ids) > length for ids in whole)
                for kinds in encoded.get("token_type_ids") or []:
                    types.append(kinds)
                    marked = marked or any(kinds)
            tokens.close()
            types.close()
            np.save(folder / f"{split}-starts.npy", disk_cache.starts_of(np.array(lengths)))
            np.save(folder / f"{split}-labels.npy", labels)
        return {
            "sizes": {split: len(part.texts) for split, part in rows.items()},
            "vocab": vocab.count_ids(tokenizer),
            "pad": vocab.pad_id(tokenizer, self._pad_of(model_dir), most),
            "left": tokenizer.padding_side == "left",
            "cut": cut,
            "token_types": marked,
        }

    def lengths(self, split: str) -> ndarray:
        """Return the (N,) numbers of tokens of a split's samples."""
        return disk_cache.lengths_of(self._array(f"{split}-starts"), np.arange(self.size(split)))

    def batch(self, split: str, indices: ndarray, *, seed: int, epoch: int) -> base.Batch:
        """Return `input_ids` and `attention_mask` (B, T), token types if the tokenizer has them, and `labels`.

        Labels are (B,) classes or scores, or (B, C) fp32 marks of the classes of a text.
        """
        indices = self._indices(split, indices)
        starts = self._array(f"{split}-starts")
        lengths_B = disk_cache.lengths_of(starts, indices)
        width = self.options.seq_len
        if self.options.pad == "longest":
            width = min(width, -(-int(lengths_B.max(initial=1)) // 8) * 8)
        real_BT, left = np.arange(width) < lengths_B[:, None], self._info["left"]
        labels = self._array(f"{split}-labels")[indices]
        if self.objective == "several":
            marks = np.zeros((len(labels), len(self.options.class_names or self._info["labels"])), dtype=np.float32)
            marks[:, self._stored_classes.outputs_of(np.arange(labels.shape[1]))] = labels
            labels = marks
        elif self.objective == "class":
            labels = self._stored_classes.outputs_of(labels) if self._stored_classes else labels.astype(np.int64)
        arrays = {
            "input_ids": disk_cache.pad_rows(
                self._array(f"{split}-tokens"), starts, indices, width, self._info["pad"], left=left
            ),
            "attention_mask": (real_BT[:, ::-1] if left else real_BT).astype(np.int64),
            "labels": labels,
        }
        if self._info["token_types"]:
            arrays["token_type_ids"] = disk_cache.pad_rows(
                self._array(f"{split}-types"), starts, indices, width, 0, left=left
            )
        if self.objective == "score" and split != "train":
            arrays["_index"] = indices.astype(np.int64)
        return base.as_tensors(**arrays)

    def score(self, logits: Tensor, batch: base.Batch, *, label_smoothing: float = 0.0) -> base.Score:
        """Score by objective: cross-entropy with the confusion matrix for one class per text.

        Several classes: binary cross-entropy, with the counts for F1. Scores: squared error, or binary cross-entropy if
        all are 0 or 1, with the predictions.
        """
        import torch
        from torch.nn import functional as F

        labels = batch["labels"]
        if self.objective == "class":
            made = base.classification_score(logits, labels, label_smoothing)
            if self.extra_sums:
                made = made._replace(extra=base.confusion(logits.argmax(-1), labels, logits.shape[-1]))
            return made
        several = self.objective == "several"
        said = logits.float() if several else logits.float().reshape(-1)
        valid_B = (labels != base.IGNORED).reshape(len(labels), -1).all(-1)
        wanted = torch.where(labels != base.IGNORED, labels, 0).float()
        binary = several or self._is_binary
        errors = F.binary_cross_entropy_with_logits(said, wanted, reduction="none") if binary else (said - wanted) ** 2
        loss, count = torch.where(valid_B, errors.reshape(len(labels), -1).mean(-1), 0).sum(), valid_B.sum().float()
        extra = None
        if several:
            chosen, real = (said.detach() > 0) & valid_B[:, None], wanted > 0
            extra = torch.stack([(chosen & real).sum(0), (chosen & ~real).sum(0), (~chosen & real).sum(0)])
            extra = extra.float().flatten()
        elif "_index" in batch:
            extra = torch.zeros(2, self._most, device=said.device)
            extra[0].index_add_(0, batch["_index"], torch.where(valid_B, said.detach(), 0))
            extra[1].index_add_(0, batch["_index"], torch.where(valid_B, wanted, 0))
            extra = extra.flatten()
        return base.Score(loss, count, loss.detach(), count, extra)

    @property
    def _most(self) -> int:
        return max(self.size(split) for split in self.splits if split != "train")

    @cached_property
    def _is_binary(self) -> bool:
        """Whether every training score is 0 or 1."""
        return bool(np.isin(self._array("train-labels"), (0, 1)).all())

    @property
    def extra_sums(self) -> int:
        """The confusion matrix, if classes are not too many; true and false positives and negatives; or predictions."""
        if self.objective == "score":
            return 2 * self._most
        many = len(self.options.class_names or self._info["labels"])
        return 3 * many if self.objective == "several" else base.cells_of(many)

    def metric_value(self, sums: base.Sums) -> base.Metrics:
        """Return accuracy and macro F1 (over present classes), micro and macro F1, or correlations, by objective."""
        if self.objective == "score":
            from scipy import stats

            said, wanted = sums.extra.reshape(2, -1)[:, : int(sums.metric_count)]
            flat = len(said) < 2 or np.ptp(said) == 0 or np.ptp(wanted) == 0
            both = (0.0, 0.0) if flat else (stats.spearmanr(said, wanted)[0], stats.pearsonr(said, wanted)[0])
            return {"spearman": float(both[0]), "pearson": float(both[1])}
        if self.objective == "class":
            every = {"accuracy": sums.metric_sum / max(sums.metric_count, 1)}
            return every | (base.of_confusion(sums.extra) if self.extra_sums else {})
        right, wrong, missed = sums.extra.reshape(3, -1)
        of_each = 2 * right / np.maximum(2 * right + wrong + missed, 1)
        micro = 2 * right.sum() / max(2 * right.sum() + wrong.sum() + missed.sum(), 1)
        return {"micro_f1": float(micro), "macro_f1": float(of_each.mean())}

    def model_overrides(self) -> base.Overrides:
        """Return the classes with their names, and the vocabulary if the tokenizer is the task's own."""
        if self.objective == "score":
            return {"num_labels": 1, "problem_type": "regression"} | super().model_overrides()
        names = self.options.class_names or self._info["labels"]
        kind = {"problem_type": "multi_label_classification"} if self.objective == "several" else {}
        return kind | {"num_labels": len(names), "id2label": dict(enumerate(names))} | super().model_overrides()

    def _particulars(self) -> base.Description:
        return {"labels": self._info["labels"]} | super()._particulars()


def _read(paths: list[Path], options: Options) -> tuple[Rows, dict[str, int]]:
    """Read all rows of these files that have texts and a label; also count the rows that were omitted.

    Raises UsageError for a text that is none, labels that are no classes, or files without rows.
    """
    texts = list(filter(None, [options.text, options.text_pair]))
    columns = [options.label] if isinstance(options.label, str) else options.label
    rows, counted = [], {"rows": 0, "without text left out": 0, "without label left out": 0}
    for path in paths:
        for number, row in tables.read(path, [*texts, *columns]):
            counted["rows"] += 1
            empty = any(map(user_data.is_empty, row[: len(texts)]))
            counted["without text left out"] += empty
            for column, text in zip(texts, row, strict=False):
                if not empty and not isinstance(text, str):
                    raise UsageError(f"{path}, row {number}: '{column}' is {quote(text)}, not a text.")
            rows += [] if empty else [row]
    found = user_data.labels_in([row[len(texts) :] for row in rows], columns, tables.class_names(paths[0], columns[0]))
    if options.objective not in ("auto", found.kind):
        found = user_data.Labels(options.objective, _convert_labels(found, options.objective, paths))
    whole = [(row, label) for row, label in zip(rows, found.values, strict=True) if label is not None]
    counted["without label left out"] = len(rows) - len(whole)
    if not whole:
        raise UsageError(f"{', '.join(map(str, paths))}: no rows{' with text and label' if counted['rows'] else ''}.")
    pairs = [row[1] for row, _ in whole] if options.text_pair else None
    return Rows([row[0] for row, _ in whole], pairs, [label for _, label in whole]), counted


def _convert_labels(found: user_data.Labels, objective: str, paths: list[Path]) -> list[Any]:
    """Convert the labels to this objective. Raises UsageError if they are of another kind."""
    if objective == "several" and found.kind == "class":
        return [None if label is None else () if classes.key(label) == "none" else (label,) for label in found.values]
    with suppress(ValueError):
        if objective == "score" and found.kind == "class":
            return [None if label is None else float(label) for label in found.values]
    has = {"class": "names", "several": "several of a text", "score": "numbers with decimals"}[found.kind]
    wants = {"class": "one class", "several": "several classes", "score": "a score"}[objective]
    raise UsageError(
        f"{', '.join(map(str, paths))}: the labels are {has}, and the model gives {wants} of each text.",
        "Without labels it can still be calibrated: name the text alone, --columns text=COLUMN, in a table without "
        "them. --classes new trains a new head for them.",
    )


def _label_names(rows: dict[str, Rows], columns: str | list[str]) -> list[str]:
    if isinstance(columns, list):
        return columns
    names = set(rows["train"].labels)
    if any(isinstance(label, tuple) for label in names):
        names = {name for label in names for name in label if classes.key(name) != "none"}
        return classes.sort_names(names)
    if len(names) < 2:
        raise UsageError(f"The training rows have one label only, '{names.pop()}': there is nothing to learn.")
    foreign = sorted({label for part in rows.values() for label in part.labels} - names)
    if foreign:
        raise UsageError(f"The evaluation rows have the label '{foreign[0]}', which no training row has.")
    return classes.sort_names(names)


def join_rows(parts: Iterable[Rows]) -> Rows:
    """Concatenate the rows of several parts."""
    columns = zip(*parts, strict=True)
    return Rows(*(None if column[0] is None else [*chain.from_iterable(column)] for column in columns))


def _split(named: Mapping[str, Rows]) -> tuple[dict[str, Rows], disk_cache.Info]:
    """Return the rows by side, from those that the data names ("train" among them), and the split's cache info."""
    rows = join_rows(named.values())
    ids = [*map(splits.hash_text, rows.texts, *([rows.pairs] if rows.pairs else []))]
    given = {side: len(part.texts) for side, part in named.items()}
    labels = None if any(isinstance(label, float) for label in rows.labels) else _in_words(rows.labels)
    split = splits.split_by_content(ids, labels, given)
    parts = {
        side: Rows(*(column and [column[i] for i in chosen] for column in rows)) for side, chosen in split.rows.items()
    }
    return parts, base.describe_split(split, "rows", labels)


def _in_words(labels: list[Any]) -> list[Any]:
    """Return labels as they are shown: several of a row joined; scores stay numbers."""
    return [" + ".join(label) or "none" if isinstance(label, tuple) else label for label in labels]
