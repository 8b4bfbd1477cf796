"""Sentences one by one for an encoder without a head, which learns what its source says of them.

There are no labels: the target of a sentence is the embedding that the teacher gives it (`training.update.distill`),
and the metric is the mean cosine of both. Embeddings are means over the real tokens, as users of such models pool them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from leansurgeon.errors import UsageError
from leansurgeon.tasks import base
from leansurgeon.tasks import cache as disk
from leansurgeon.tasks.text import classification, corpus, vocab

if TYPE_CHECKING:
    from torch import Tensor

TARGET = "_target"  # (B, D) of a batch: the teacher's embeddings
LEAST = 20  # characters; shorter lines are headings and numbers


class Options(base.Options):
    """`data` and `eval_data` as in the language tasks; without eval_data, `eval_fraction` of the sentences is held out,
    chosen by `split_seed`. Sentences are cut at `seq_len` tokens.
    """

    data: str | list[str] = "austen"
    eval_data: str | list[str] | None = None
    eval_fraction: float = Field(0.1, gt=0, lt=1)
    split_seed: int = Field(0, ge=0)
    text: str = "text"
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
            "version": 1,
            "tokenizer": vocab.key_of(o.tokenizer, o.vocab_size, model_dir),
            "train": data.key(),
            "eval": [o.eval_fraction, o.split_seed] if other is None else other.key(),
            "seq_len": o.seq_len,
        }

        def build(folder: Path) -> disk.Info:
            lines = of_documents(data.whole())
            if other is None:
                lines, held = hold_out(lines, o.eval_fraction, o.split_seed)
            else:
                held = [line for line in of_documents(other.whole()) if line not in set(lines)]
            for split, rows in (("train", lines), ("eval", held)):
                if not rows:
                    raise UsageError(f"The {split} data has no sentence of more than {LEAST} characters.")
            say(f"{self.name}: tokenising {len(lines) + len(held):,} sentences ({o.tokenizer})")
            tokenizer = vocab.make(o.tokenizer, o.vocab_size, lines, model_dir)
            tokenizer.save_pretrained(folder / "tokenizer")
            for split, rows in (("train", lines), ("eval", held)):
                classification.store_tokens(folder, split, rows, None, tokenizer, o.seq_len)
                np.save(folder / f"{split}-labels.npy", np.zeros(len(rows), dtype=np.int32))
            return {
                "sizes": {"train": len(lines), "eval": len(held)},
                "vocab": len(tokenizer),
                "pad": tokenizer.pad_token_id or 0,
                "token_types": False,
            }

        self._open(disk.entry(cache, "sentences", key, build))
        self._sources = data.names + ([] if other is None else other.names)

    def score(self, logits: Tensor, batch: dict[str, Tensor], *, label_smoothing: float = 0.0) -> base.Score:
        """`logits` are the student's embeddings (B, D), and the teacher's stand in the batch."""
        return cosine_score(logits, batch)

    def model_overrides(self) -> base.Overrides:
        o = self.options
        if o.tokenizer == "model":
            return {}
        return {"vocab_size": vocab.config_size(o.tokenizer, o.vocab_size, self._info["vocab"])}

    def describe(self) -> base.Description:
        return {
            "train_samples": self.size("train"),
            "eval_samples": self.size("eval"),
            "tokenizer": self.options.tokenizer,
            "vocab_size": self._info["vocab"],
            "seq_len": self.options.seq_len,
            "source": ", ".join(self._sources),
            "licence": "as the files' owner says",
        }


def cosine_score(embeddings: Tensor, batch: dict[str, Tensor]) -> base.Score:
    """Sums over samples of 1 - cosine (the loss) and of the cosine, between (B, D) embeddings and `batch[TARGET]`."""
    import torch
    from torch.nn import functional as F

    cosines_B = F.cosine_similarity(embeddings.float(), batch[TARGET].float(), dim=-1)
    valid_B = batch["labels"] != base.IGNORED
    count = valid_B.sum().float()
    kept_B = torch.where(valid_B, cosines_B, 0)
    return base.Score(count - kept_B.sum(), count, kept_B.detach().sum(), count)


def of_documents(documents: Iterable[str | list[int]]) -> list[str]:
    """The different sentences of all documents in their order. Raises UsageError for documents of token ids."""
    unique: dict[str, None] = {}
    for document in documents:
        if not isinstance(document, str):
            raise UsageError("The data holds token ids, and sentences are cut from text.")
        unique.update(dict.fromkeys(sentences(document)))
    return list(unique)


def sentences(text: str) -> list[str]:
    """The different sentences of a text in their order: its lines, long ones cut behind full stops."""
    unique: dict[str, None] = {}
    for line in text.splitlines():
        pieces = re.split(r"(?<=[.!?])\s+", line.strip()) if len(line) > 300 else [line.strip()]
        unique.update((piece, None) for piece in pieces if len(piece) > LEAST)
    return list(unique)


def hold_out(lines: list[str], fraction: float, seed: int) -> tuple[list[str], list[str]]:
    """All but, and a random choice of about this fraction, both in their order. Raises UsageError for one line."""
    order = np.random.default_rng(seed).permutation(len(lines))
    held = max(1, round(fraction * len(lines)))
    if held >= len(lines):
        raise UsageError(
            f"The data has {len(lines)} sentence(s) of more than {LEAST} characters, too few to hold any out."
        )
    chosen = set(order[:held].tolist())
    parts = ([line for i, line in enumerate(lines) if (i in chosen) == kept] for kept in (False, True))
    return tuple(parts)
