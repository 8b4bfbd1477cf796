"""Language modelling on text files: the next token (causal) or masked tokens, both judged by perplexity.

The tokenised text of all files is one long row of tokens; a sample is a window of `seq_len` of them, and windows do not
overlap. If the tokenizer puts a token before every text (BOS), each window starts with it, and it is not scored. In
each training epoch the windows start at another offset, determined by (seed, epoch). For evaluation, blocks of text are
held out by their content unless `eval_fraction` is set. Perplexities are comparable only between models with the same
tokenizer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy import ndarray
from pydantic import Field

from leansurgeon.errors import UsageError
from leansurgeon.progress import PLAIN_EVERY, Say
from leansurgeon.reading.files import in_home
from leansurgeon.tasks import base, chance, disk_cache, splits, user_data
from leansurgeon.tasks.text import corpus, vocab
from leansurgeon.tasks.text import files as text_files

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

_OFFSET, _MASK = 1, 2  # random streams
_EVAL_SEED = 0
MASKED, REPLACED = 0.8, 0.1  # fractions of the chosen tokens; the rest is unchanged, but predicted too


class Options(base.Options):
    """Options of the task.

    `data`, `eval_data`, `test_data`: text files, globs, `austen`, tables (csv, tsv, jsonl, parquet) with the column
    `text`, or a data set of the hub (`hub:roneneldan/TinyStories`; `eval_data` then takes its split "validation",
    `test_data` its "test"). Splits that are not named are cut from `data` by content; with `eval_fraction` the last
    part of each text file, and of the rows of tables, is for evaluation instead, and there is no test. `documents`: use
    only this many rows of `data`, the first. If the files of a folder or glob are named after splits (train,
    validation, test), each is used for its split. Several text columns are joined by line breaks or, with `chat`, read
    as what a user says and an assistant answers. A column of lists is read as token ids of the chosen tokenizer, or as
    a chat; chats are written by the tokenizer's template, if it has one.

    `vocab_size`: for bpe and wordpiece the size to train (4096), for char and byte the rows of the embedding, if more
    than tokens.
    """

    data: str | list[str] = "austen"
    eval_data: str | list[str] | None = None
    test_data: str | list[str] | None = None
    eval_fraction: float | None = Field(None, gt=0, lt=1)
    text: str | list[str] = "text"
    chat: bool = False
    documents: int | None = Field(None, ge=2)
    seq_len: int = Field(256, ge=2)
    tokenizer: vocab.Choice = "model"
    vocab_size: vocab.Size = None
    random_windows: bool = True


class MaskedOptions(Options):
    """The options of `CausalLM`, and the fraction of tokens to predict."""

    mask_prob: float = Field(0.15, gt=0, lt=1)


class CausalLM(vocab.Tokenized):
    """Predict every token from those before it. Batches are full windows without padding or attention mask."""

    name = "causal-lm"
    head = "causal-lm"
    metric = base.Metric("perplexity", "perplexity", higher_is_better=False, percent=False)
    Options = Options

    def prepare(self, cache: Path, model_dir: Path | None, *, workers: int, say: Say) -> None:
        """Tokenise the documents and pack them into one long array in the cache once."""
        o = self.options
        vocab.check_length(o.seq_len, model_dir)
        corpora = corpus.find_named(o, chat=o.chat, render=self._template(model_dir))
        data, names = corpora["train"], [name for one in corpora.values() for name in one.names]
        key = {
            # 2 read quotation marks in .tsv files as quotes; entries made from other files are valid.
            "version": 3 if any(name.endswith(".tsv") for name in names) else 2,
            "tokenizer": self._tokenizer_key(model_dir),
            "train": data.key(),
            "eval": o.eval_fraction or [splits.RULE, *([name, one.key()] for name, one in corpora.items())],
        }

        def build(folder: Path) -> disk_cache.Info:
            if o.eval_fraction:
                sides, found = dict(zip(base.SPLITS, data.split_last(o.eval_fraction), strict=True)), {}
            else:
                split, sides = corpus.split_documents(corpora)
                found = base.describe_split(split, "blocks of text")
            say(f"{self.name}: tokenising {', '.join(data.names[:3])}{' ...' * (len(data.names) > 3)} ({o.tokenizer})")
            tokenizer = self._make_tokenizer(folder, sides["train"](), model_dir)
            info = _pack(folder, tokenizer, sides, say) | found
            return info | {"was_read": corpus.tell(corpora, {"characters": sum(info["characters"].values())})}

        self._open(cache, "text", key, build)
        self._begin = vocab.beginning(self.tokenizer())
        packaged = names == [text_files.PACKAGED["austen"].name]
        self.source = "Jane Austen, Persuasion (1818)" if packaged else user_data.name_some(names)
        self.licence = "public domain" if packaged else type(self).licence
        for split in self.splits:
            if self.size(split) < 1:
                tokens = self._info["tokens"][split]
                raise UsageError(
                    f"The {split} text has {tokens:,} tokens, too few for one window of seq_len {o.seq_len}"
                    f"{' at every offset' if split == 'train' and o.random_windows else ''}.",
                    f"Give more text{', ' if o.eval_fraction else ' or '}a shorter seq_len"
                    f"{' or another eval_fraction' if o.eval_fraction else ''}.",
                )

    def size(self, split: str) -> int:
        """Return the number of windows of `seq_len` tokens in a split."""
        split, width = self._check_split(split), self._width
        offsets = width - 1 if split == "train" and self.options.random_windows else 0
        return max(0, self._info["tokens"][split] - offsets) // width

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(side for side in splits.SIDES if side in self._info["tokens"])

    @property
    def _width(self) -> int:
        """Tokens of text in a window."""
        return self.options.seq_len - len(self._begin)

    def batch(self, split: str, indices: ndarray, *, seed: int, epoch: int) -> base.Batch:
        """Return `input_ids` and `labels` (B, T), which are equal."""
        tokens_BT = self._windows(split, np.asarray(indices), seed, epoch)
        return base.as_tensors(input_ids=tokens_BT.astype(np.int64), labels=tokens_BT.astype(np.int64))

    def score(self, logits: Tensor, batch: base.Batch, *, label_smoothing: float = 0.0) -> base.Score:
        """Score token t against the logits of position t - 1; the first token of a window is not scored."""
        from torch.nn import functional as F

        # Shift the labels, not the logits: slicing those would copy them, and they are as wide as the vocabulary.
        return base.token_score(logits, F.pad(batch["labels"][:, 1:], (0, 1), value=base.IGNORED), label_smoothing)

    def metric_value(self, sums: base.Sums) -> base.Metrics:
        """Return perplexity from the mean negative log-likelihood per token (nats); inf if too large for a float."""
        mean = sums.metric_sum / max(sums.metric_count, 1)
        return {self.metric.key: math.exp(mean) if mean < 709 else math.inf}

    def _particulars(self) -> base.Description:
        """Return tokens and characters of the data."""
        tokens = {f"{split}_tokens": self._info["tokens"][split] for split in self.splits}
        return {**tokens, "characters": self._info["characters"], **super()._particulars()}

    def _windows(self, split: str, indices_B: ndarray, seed: int, epoch: int) -> ndarray:
        """Return (B, seq_len) tokens in their stored dtype. Raises IndexError for an index that the split lacks."""
        indices_B, width = self._indices(split, indices_B), self._width
        offset = 0
        if split == "train" and self.options.random_windows:
            offset = _offset(seed, epoch, width)
        # All windows of an epoch as rows of one view of the file; whole rows are copied.
        windows = self._array(split)[offset : offset + self.size(split) * width].reshape(-1, width)
        return np.insert(np.take(windows, indices_B, axis=0), [0] * len(self._begin), self._begin, axis=1)


@lru_cache(maxsize=4)
def _offset(seed: int, epoch: int, width: int) -> int:
    """Return where the windows of a training epoch start."""
    return int(chance.integers(seed, epoch, np.zeros(1, dtype=np.int64), 1, 0, width, stream=_OFFSET)[0, 0])


class MaskedLM(CausalLM):
    """Predict masked tokens from both sides (Devlin et al., 2019).

    Of the chosen tokens 80 % become [MASK], 10 % another token, and 10 % stay. Windows hold text only, without [CLS]
    and [SEP], as in Crammed BERT. The choice depends on (seed, epoch, index); in evaluation it is always the same.
    "_places" of a batch lists the chosen tokens (`hide_tokens`), so that a model may predict only there.
    """

    name = "masked-lm"
    head = "masked-lm"
    Options = MaskedOptions

    def prepare(self, cache: Path, model_dir: Path | None, *, workers: int, say: Say) -> None:
        """Tokenise the documents and pack them into one long array in the cache once."""
        super().prepare(cache, model_dir, workers=workers, say=say)
        tokenizer = self._with_mask(self.tokenizer())
        self._mask_id, self._special = tokenizer.mask_token_id, np.zeros(vocab.count_ids(tokenizer), dtype=bool)
        self._special[tokenizer.all_special_ids] = True

    def _make_tokenizer(self, folder: Path, texts: Iterable[str], model_dir: Path | None) -> PreTrainedTokenizerBase:
        return self._with_mask(super()._make_tokenizer(folder, texts, model_dir))  # checked before tokenising

    def _with_mask(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
        if tokenizer.mask_token_id is not None:
            return tokenizer
        kind, hint = self.options.tokenizer, "Choose a tokenizer of the task's own: char, byte, bpe or wordpiece."
        if "/" in kind and not (in_home(kind) / "tokenizer_config.json").exists():
            hint = (
                "tokenizer_config.json and special_tokens_map.json say which token that is, and are missing: copy them "
                "from where tokenizer.json came from."
            )
        whose = f"that in {kind}" if "/" in kind else "the model's"
        raise UsageError(f"Task 'masked-lm' needs a tokenizer with a mask token, and {whose} names none.", hint)

    def batch(self, split: str, indices: ndarray, *, seed: int, epoch: int) -> base.Batch:
        """Return `input_ids` and `labels` (B, T), -100 where nothing is predicted, and `_places`."""
        indices = np.asarray(indices)
        tokens_BT = self._windows(split, indices, seed, epoch)
        if split != "train":
            seed, epoch = _EVAL_SEED, 0
        draws_BT = chance.words(seed, epoch, indices, tokens_BT.shape[1], stream=_MASK)
        share, size = self.options.mask_prob, self._info["vocab"]
        return base.as_tensors(**hide_tokens(tokens_BT, draws_BT, share, self._mask_id, self._special, size))

    def score(self, logits: Tensor, batch: base.Batch, *, label_smoothing: float = 0.0) -> base.Score:
        """Return the cross-entropy of the chosen tokens only."""
        return base.token_score(logits, batch["labels"], label_smoothing)


def hide_tokens(
    tokens_BT: ndarray, draws_BT: ndarray, share: float, mask_id: int, special: ndarray, vocab_size: int
) -> dict[str, ndarray]:
    """Choose tokens with probability `share`, never those whose ids are true in `special` (vocab_size,).

    Returns `input_ids` and `labels` (B, T) int64, and `_places` (N,) int64: the positions to predict in the flattened
    batch, padded. One draw (uint32) per token decides whether it is chosen; rescaled, what becomes of it; and rescaled
    again, which token replaces it. 32 bits are enough for all three.
    """
    chosen_N = np.flatnonzero(draws_BT < np.uint32(min(share * 2.0**32, 2**32 - 1)))
    told_N = tokens_BT.reshape(-1)[chosen_N]
    allowed_N = ~special[told_N]
    chosen_N, told_N = chosen_N[allowed_N], told_N[allowed_N]
    fate_N = draws_BT.reshape(-1)[chosen_N] / (share * 2.0**32)
    shown_N = told_N.astype(np.int64)
    shown_N[fate_N < MASKED] = mask_id
    other = np.flatnonzero(fate_N >= 1 - REPLACED)
    any_token = (fate_N[other] - (1 - REPLACED)) / REPLACED * vocab_size
    shown_N[other] = np.minimum(any_token.astype(np.int64), vocab_size - 1)
    input_ids, labels = tokens_BT.astype(np.int64), np.full(tokens_BT.shape, base.IGNORED, dtype=np.int64)
    input_ids.reshape(-1)[chosen_N] = shown_N
    labels.reshape(-1)[chosen_N] = told_N
    # A compiled model is recompiled for every new number of places, so they are padded with an unscored position to a
    # length that hardly ever changes between batches: five standard deviations above the mean of the binomial
    # distribution, rounded up to a multiple of eight; if more were chosen, the next multiple.
    tokens = labels.size
    usual = tokens * share + 5 * math.sqrt(tokens * share * (1 - share))
    missing = min(tokens, -(-max(math.ceil(usual), len(chosen_N)) // 8) * 8) - len(chosen_N)
    unscored = np.argmax(labels.reshape(-1) == base.IGNORED)
    places = np.concatenate((chosen_N, np.full(missing, unscored, dtype=np.int64)))
    return {"input_ids": input_ids, "labels": labels, "_places": places}


def _pack(
    folder: Path, tokenizer: PreTrainedTokenizerBase, texts: dict[str, corpus.Documents], say: Say
) -> disk_cache.Info:
    """Write one array of tokens per split, the documents one after another."""
    size = vocab.count_ids(tokenizer)
    dtype = vocab.dtype_for(size)
    tokens, characters, told = {}, dict.fromkeys(texts, 0), time.monotonic()

    def read(split: str) -> Iterator[corpus.Document]:
        nonlocal told
        for number, document in enumerate(texts[split]()):
            characters[split] += len(document) if isinstance(document, str) else 0
            if time.monotonic() - told > PLAIN_EVERY:
                told = time.monotonic()
                say(f"tokenising: {number:,} documents, {characters[split]:,} characters so far")
            yield document

    for split in texts:
        writer = disk_cache.ArrayWriter(folder / f"{split}.npy", dtype)
        for part in vocab.encode_all(tokenizer, read(split), dtype):
            writer.append(part)
        writer.close()
        tokens[split] = writer.length
    return {"characters": characters, "tokens": tokens, "vocab": size}
