"""ListOps of the Long Range Arena: the value, 0 to 9, of a nested expression such as `[MAX 2 9 [MIN 4 7 ] 0 ]`.

The expressions are generated here, because the distribution is published and the files are part of an archive of 7.7
GB. Depth and number of arguments are at most 10, 500 < length < 2000, 96,000 / 2,000 / 2,000 distinct expressions (Tay
et al., "Long Range Arena", ICLR 2021). The published split takes a Python set in hash order, which differs between
runs; ours keeps the order of drawing, which is as random and reproducible.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
from pydantic import Field, model_validator

from leansurgeon.errors import UsageError
from leansurgeon.progress import Say, phase
from leansurgeon.tasks import base, disk_cache
from leansurgeon.tasks.long_range import makers
from leansurgeon.tasks.long_range.listops_trees import TREES_PER_CHUNK, Grammar, Trees, chunk
from leansurgeon.tasks.text import vocab

PAD = 0  # symbol i of SYMBOLS is token i + 1; 15 symbols and the padding, in the published vocabulary of 32
_VERSION = 1  # of the generator; increased when the data changes
_PATIENCE = 50  # chunks in a row without a new expression


class Options(base.Options):
    """Options of `listops`.

    Defaults are the published data set; smaller numbers give a mini variant. Both length bounds are exclusive.
    """

    train: int = Field(96_000, ge=1)
    eval: int = Field(2_000, ge=1)
    test: int = Field(2_000, ge=0)
    max_depth: int = Field(10, ge=2)
    max_args: int = Field(10, ge=2)
    min_length: int = Field(500, ge=1)
    max_length: int = Field(2_000, ge=5)
    seed: int = Field(0, ge=0, description="of the data, not of the training")
    seq_len: int | None = Field(None, ge=4, description="tokens per sample; the power of two from max_length up")

    @model_validator(mode="after")
    def _bounds(self) -> Options:
        if self.max_length - self.min_length < 2:
            raise ValueError(f"no length lies between {self.min_length} and {self.max_length}, both exclusive")
        if self.seq_len is not None and self.seq_len < self.max_length - 1:
            raise ValueError(f"seq_len {self.seq_len} is shorter than the longest expression, {self.max_length - 1}")
        return self


class ListOps(base.Task):
    """Ten-way classification of symbol sequences, padded to one length (2,048 in the published setting)."""

    name = "listops"
    overrides = {"num_labels": 10}  # noqa: RUF012
    head = "sequence-classification"
    metric = base.ACCURACY
    Options = Options
    licence = "made by leansurgeon: no rights attached"

    def prepare(self, cache: Path, model_dir: Path | None, *, workers: int, say: Say) -> None:
        """Generate the trees once in `workers` processes, depending on the seed only."""
        o = self.options
        vocab.check_length(self.seq_len, model_dir)
        self.source = (
            f"ListOps of the Long Range Arena, generated: depth {o.max_depth}, {o.max_args} arguments, "
            f"{o.min_length} < length < {o.max_length}, seed {o.seed}"
        )
        grammar = Grammar(o.max_depth, o.max_args, o.min_length, o.max_length)
        sizes = {"train": o.train, "eval": o.eval} | ({"test": o.test} if o.test else {})
        key = {"version": _VERSION, "seed": o.seed, "sizes": list(sizes.items()), "grammar": vars(grammar)}
        self._open(cache, "listops", key, partial(_generate, grammar, o.seed, sizes, workers, say))

    def batch(self, split: str, indices: np.ndarray, *, seed: int, epoch: int) -> base.Batch:
        """Return `input_ids` and `attention_mask` (B, seq_len) and `labels` (B,) from 0 to 9."""
        rows = self._indices(split, indices) + self._info["first"][split]
        tokens_BT = disk_cache.pad_rows(self._array("tokens"), self._array("starts"), rows, self.seq_len, PAD)
        mask, labels = (tokens_BT != PAD).astype(np.int64), self._array("labels")[rows].astype(np.int64)
        return base.as_tensors(input_ids=tokens_BT, attention_mask=mask, labels=labels)

    @property
    def seq_len(self) -> int:
        """Tokens per sample after padding."""
        return self.options.seq_len or 1 << (self.options.max_length - 1).bit_length()

    def _particulars(self) -> base.Description:
        return {"seq_len": self.seq_len}


def _generate(
    grammar: Grammar, seed: int, sizes: dict[str, int], workers: int, say: Say, folder: Path
) -> disk_cache.Info:
    """Write tokens (flat, uint8), starts and labels of all splits, one split after another, into `folder`."""
    total = sum(sizes.values())
    workers = min(workers, 1 + total // (4 * TREES_PER_CHUNK))  # a process takes half a second to start
    say(f"listops: generating {total:,} expressions with {workers} process{'es' if workers > 1 else ''}")
    tokens = disk_cache.ArrayWriter(folder / "tokens.npy", np.uint8)
    lengths, labels = [], []
    begun = time.monotonic()
    made = makers.chunks(chunk, (grammar, seed), workers)
    with closing(made), phase("listops", total, "expressions/s") as advance:
        for trees in _distinct(made, total, grammar):
            tokens.append(trees.symbols + np.uint8(1))
            lengths.append(trees.lengths)
            labels.append(trees.values)
            advance(len(trees.lengths))
    tokens.close()
    say(f"listops: {total:,} expressions, {tokens.length:,} symbols, in {time.monotonic() - begun:.1f} s")
    np.save(folder / "starts.npy", disk_cache.starts_of(np.concatenate(lengths)))
    np.save(folder / "labels.npy", np.concatenate(labels).astype(np.uint8))
    return disk_cache.name_stretches(sizes)


def _distinct(chunks: Iterator[Trees | None], total: int, grammar: Grammar) -> Iterator[Trees]:
    """Yield the first `total` distinct expressions in the order of drawing, as conditioning on "not seen before" does.

    Raises UsageError if the bounds keep no tree, or fewer distinct ones than requested.
    """
    seen = set()
    idle = 0
    for trees in chunks:
        if trees is None:
            raise UsageError(
                f"listops: practically no expression of depth {grammar.max_depth} and {grammar.max_args} arguments "
                f"has a length between {grammar.min_length} and {grammar.max_length}.",
                "Widen the bounds.",
            )
        ends = np.cumsum(trees.lengths)
        new = np.zeros(len(ends), dtype=bool)
        for i, (start, end) in enumerate(zip(ends - trees.lengths, ends, strict=True)):
            digest = hashlib.blake2b(trees.symbols[start:end], digest_size=16).digest()
            if len(seen) < total and digest not in seen:
                seen.add(digest)
                new[i] = True
        idle = 0 if new.any() else idle + 1
        if new.any():
            yield Trees(trees.symbols[np.repeat(new, trees.lengths)], trees.lengths[new], trees.values[new])
        if len(seen) == total:
            return
        if idle == _PATIENCE:
            raise UsageError(
                f"listops: only {len(seen):,} different expressions turned up where {total:,} are wanted.",
                "Ask for fewer, or widen the length bounds.",
            )
