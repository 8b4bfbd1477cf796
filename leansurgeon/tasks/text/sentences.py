"""Sentences one by one for an encoder without a head, which learns what its source says of them.

There are no labels: the target of a sentence is the embedding that the teacher gives it (`training.update.distill`),
and the metric is the mean cosine of both. Embeddings are means over the real tokens, as users of such models pool them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from leansurgeon.errors import UsageError
from leansurgeon.tasks import base, chance
from leansurgeon.tasks import cache as disk
from leansurgeon.tasks.text import classification, corpus, vocab
from leansurgeon.tasks.text.tokenized import Tokenized

if TYPE_CHECKING:
    from torch import Tensor

TARGET = "_target"  # (B, D) of a batch: the teacher's embeddings


class Options(base.Options):
    """`data` and `eval_data` as in the language tasks; without eval_data, `eval_fraction` of the sentences is held out,
    chosen by `split_seed`. Sentences are cut at `seq_len` tokens.
    """

    data: str | list[str] = "austen"
    eval_data: str | list[str] | None = None
    eval_fraction: float = Field(0.1, gt=0, lt=1)
    split_seed: int = Field(0, ge=0)
    text: str | list[str] = "text"
    documents: int | None = Field(None, ge=2)
    seq_len: int = Field(128, ge=4)
    pad: Literal["longest", "max"] = "longest"
    tokenizer: vocab.Choice = "model"
    vocab_size: int | None = Field(None, ge=16)


class Sentences(classification.TextClassification):
    """Sentences as an encoder embeds them: special tokens around each, padding behind."""

    name = "sentences"
    head = "features"
    metric = base.Metric("cosine", "cosine to the source", higher_is_better=True, percent=False)
    Options = Options

    def prepare(self, cache: Path, model_dir: Path | None, *, workers: int, say: Callable[[str], None]) -> None:
        o = self.options
        vocab.check_length(o.seq_len, model_dir)
        data = corpus.find(o.data, o.text, first=o.documents)
        other = None if o.eval_data is None else corpus.find(o.eval_data, o.text, split="validation")
        key = {
            "version": 2,  # 1 left out short rows of tables
            "tokenizer": self._tokenizer_key(model_dir),
            "train": data.key(),
            "eval": [o.eval_fraction, o.split_seed] if other is None else other.key(),
            "seq_len": o.seq_len,
        }

        def build(folder: Path) -> disk.Info:
            lines = data.texts()
            if other is None:
                lines, held = hold_out(lines, o.eval_fraction, o.split_seed)
            else:
                known = set(lines)
                held = [line for line in other.texts() if line not in known]
            rows = {
                split: classification.Rows(texts, None, np.zeros(len(texts), dtype=np.int32))
                for split, texts in (("train", lines), ("eval", held))
            }
            if empty := [split for split, part in rows.items() if not part.texts]:
                raise UsageError(f"The {empty[0]} data has no sentence of more than {corpus.LEAST} characters.")
            say(f"{self.name}: tokenising {len(lines) + len(held):,} sentences ({o.tokenizer})")
            return self._store(folder, rows, model_dir)

        self._open(disk.entry(cache, "sentences", key, build))
        self.source = ", ".join(data.names + ([] if other is None else other.names))

    def score(self, logits: Tensor, batch: dict[str, Tensor], *, label_smoothing: float = 0.0) -> base.Score:
        """`logits` are the student's embeddings (B, D), and the teacher's stand in the batch."""
        return cosine_score(logits, batch)

    def model_overrides(self) -> base.Overrides:
        return Tokenized.model_overrides(self)

    def _particulars(self) -> base.Description:
        return Tokenized._particulars(self)


def cosine_score(embeddings: Tensor, batch: dict[str, Tensor]) -> base.Score:
    """Sums over samples of 1 - cosine (the loss) and of the cosine, between (B, D) embeddings and `batch[TARGET]`."""
    import torch
    from torch.nn import functional as F

    cosines_B = F.cosine_similarity(embeddings.float(), batch[TARGET].float(), dim=-1)
    valid_B = batch["labels"] != base.IGNORED
    count = valid_B.sum().float()
    kept_B = torch.where(valid_B, cosines_B, 0)
    return base.Score(count - kept_B.sum(), count, kept_B.detach().sum(), count)


def hold_out(lines: list[str], fraction: float, seed: int) -> tuple[list[str], list[str]]:
    """All but, and a random choice of about this fraction, both in their order. Raises UsageError for one line."""
    parts = chance.held_out(len(lines), fraction, seed)
    if not len(parts["train"]):
        raise UsageError(f"The data has {len(lines)} sentence(s), too few to hold any out.")
    return [lines[i] for i in parts["train"]], [lines[i] for i in parts["eval"]]
