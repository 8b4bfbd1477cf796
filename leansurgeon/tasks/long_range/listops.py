"""ListOps of the Long Range Arena: the value, 0 to 9, of a nested expression such as `[MAX 2 9 [MIN 4 7 ] 0 ]`.

The expressions are generated here, because the distribution is published and the files are part of an archive of 7.7
GB. Depth and number of arguments are at most 10, 500 < length < 2000, 96,000 / 2,000 / 2,000 distinct expressions (Tay
et al., "Long Range Arena", ICLR 2021). The published split takes a Python set in hash order, which differs between
runs; ours keeps the order of drawing, which is as random and reproducible.

The published code (Nangia and Bowman 2018; Tay et al. 2021, long-range-arena `listops.py`) grows a tree from its root:
a node above the last level is an operator with probability 1/4, with 2 to `max_args` arguments and one of four
operators, all equally likely, and otherwise a digit. A tree is kept if min_length < length < max_length, where a digit
counts 1 and an operator 2 (itself and its closing bracket). Nine of ten trees are rejected, after the longest have been
built completely.

Here trees are grown level by level, and as numbers only at first. The size of the next level depends only on how many
nodes of this level are of each kind (digit, or operator with k arguments): one multinomial draw. A tree is dropped as
soon as its known nodes are too many. For the kept trees the kinds are then arranged in random order within each level,
which, given the counts, has exactly the distribution of independent draws. Nodes are stored level by level, with the
children of a parent side by side, so that sizes and values are computed upwards, and positions downwards, in a few
array operations per level for a few hundred trees together.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy import ndarray
from numpy.random import Generator
from pydantic import Field, model_validator

from leansurgeon.errors import UsageError
from leansurgeon.progress import Say, phase
from leansurgeon.tasks import base, disk_cache
from leansurgeon.tasks.long_range import makers
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


# -- trees ------------------------------------------------------------------------------------------

OPERATOR_SHARE = 0.25
SYMBOLS = (*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
_FIRST_OPERATOR, _CLOSE = 10, 14
CANDIDATES = 4096
TREES_PER_CHUNK = 320
# An acceptance rate below about one in ten million is treated as a mistake in the options.
_HOPELESS = 10_000_000


@dataclass(frozen=True)
class Grammar:
    """Which trees are drawn and kept.

    Depth counts the root as 1, operators have at least 2 arguments, and both length bounds are exclusive.
    """

    max_depth: int = 10
    max_args: int = 10
    min_length: int = 500
    max_length: int = 2000


class Trees(NamedTuple):
    """Concatenated expressions: symbols (all tokens,) uint8 indexing SYMBOLS, lengths (trees,) and values (trees,)."""

    symbols: ndarray
    lengths: ndarray
    values: ndarray


def chunk(grammar: Grammar, seed: int, number: int, trees: int = TREES_PER_CHUNK) -> Trees | None:
    """Return chunk `number` of `trees` kept expressions of this seed; None if the bounds keep practically nothing.

    Chunks are independent and identically distributed, and each depends on (grammar, seed, number, trees) only.
    """
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(number,)))
    # (trees, max_depth, max_args) int32 numbers of nodes per tree, level and kind: column 0 digits, column j operators
    # with j + 1 arguments
    kept, fitting, tried, candidates = [], 0, 0, CANDIDATES
    while fitting < trees:
        counts = _grow_counts(grammar, rng, candidates)
        kept.append(counts)
        fitting, tried = fitting + len(counts), tried + candidates
        if tried >= _HOPELESS and fitting == 0:
            return None
        missing = 1.2 * (trees - fitting) * tried / max(fitting, 1)
        candidates = int(min(max(missing, 256), 8 * CANDIDATES))
    return _build(grammar, rng, np.concatenate(kept)[:trees])


def _grow_counts(grammar: Grammar, rng: Generator, candidates: int) -> ndarray:
    """Grow `candidates` trees as counts; return those within the bounds, in the order in which they were started."""
    kinds = grammar.max_args  # a digit, and operators with 2 .. max_args arguments
    arguments = np.arange(1, kinds + 1)
    arguments[0] = 0
    shares = np.full(kinds, OPERATOR_SHARE / (kinds - 1))
    shares[0] = 1 - OPERATOR_SHARE
    growing, nodes = np.arange(candidates), np.ones(candidates, dtype=np.int64)
    length = np.ones(candidates, dtype=np.int64)  # all nodes known so far, and the closing brackets
    levels = []
    for _ in range(grammar.max_depth - 1):
        drawn = rng.multinomial(nodes, shares)
        levels.append((growing, drawn))
        operators, nodes = nodes - drawn[:, 0], drawn @ arguments
        length[growing] += nodes + operators
        going = (nodes > 0) & (length[growing] < grammar.max_length)
        growing, nodes = growing[going], nodes[going]
    last = np.zeros((len(nodes), kinds), dtype=np.int64)
    last[:, 0] = nodes
    levels.append((growing, last))

    kept = np.flatnonzero((length > grammar.min_length) & (length < grammar.max_length))
    place = np.full(candidates, -1)
    place[kept] = np.arange(len(kept))
    counts = np.zeros((len(kept), grammar.max_depth, kinds), dtype=np.int32)
    for level, (trees, drawn) in enumerate(levels):
        wanted = place[trees] >= 0
        counts[place[trees[wanted]], level] = drawn[wanted]
    return counts


class _Level(NamedTuple):
    """One level of all trees, tree by tree. Every node has a digit, which operators ignore."""

    digit: ndarray  # (nodes,) uint8
    at: ndarray  # (operators,) indices of the nodes that are operators
    arguments: ndarray  # (operators,) int32, number of children
    operator: ndarray  # (operators,) uint8, 0 to 3: MIN, MAX, MED or SM


def _build(grammar: Grammar, rng: Generator, counts: ndarray) -> Trees:
    levels = [_draw_level(rng, counts[:, level]) for level in range(grammar.max_depth)]
    sizes, values = _sizes_and_values(levels)
    lengths = sizes[0]
    symbols = np.empty(int(lengths.sum()), dtype=np.uint8)
    position = _before(lengths)
    for level, size, child_size in zip(levels, sizes, [*sizes[1:], None], strict=True):
        symbols[position] = level.digit
        if not len(level.at):
            break
        at = position[level.at]
        symbols[at] = level.operator + np.uint8(_FIRST_OPERATOR)
        symbols[at + size[level.at] - 1] = _CLOSE
        before = _before(child_size)
        position = np.repeat(at + 1 - before[_before(level.arguments)], level.arguments) + before
    return Trees(symbols, lengths.astype(np.int64), values[0].astype(np.int64))


def _draw_level(rng: Generator, counts_NK: ndarray) -> _Level:
    """Arrange one level of all trees: the kinds of each tree, in random order within the tree."""
    trees, kinds = counts_NK.shape
    # One sort by (tree, random bits, kind) keeps a tree's nodes together and shuffles them. Two nodes of a tree are in
    # the order of their kinds only if their 40 bits are equal: for 2,000 nodes in about one tree of 500,000.
    bits = (kinds - 1).bit_length()
    labels = (np.arange(trees)[:, None] << 40 + bits) | np.arange(kinds)
    key = np.repeat(labels.ravel(), counts_NK.ravel())
    key |= rng.integers(0, 1 << 40, len(key)) << bits
    key.sort()
    kind = key.astype(np.int32) & ((1 << bits) - 1)
    at = np.flatnonzero(kind)
    return _Level(
        rng.integers(0, 10, len(kind), dtype=np.uint8), at, kind[at] + 1, rng.integers(0, 4, len(at), dtype=np.uint8)
    )


def _sizes_and_values(levels: list[_Level]) -> tuple[list[ndarray], list[ndarray]]:
    """Return tokens and value of the expression under every node, level by level, computed from the last level up."""
    sizes, values = [], []
    below_size = below_value = np.empty(0, dtype=np.int32)
    for level in reversed(levels):
        size, value = np.ones(len(level.digit), dtype=np.int32), level.digit.astype(np.int32)
        if len(level.at):
            first = _before(level.arguments)
            size[level.at] = 2 + np.add.reduceat(below_size, first, dtype=np.int32)
            # In the sorted children of an operator, MIN, MAX and MED are single elements (MED of an even number is the
            # mean of the middle two, rounded down, as int(np.median) gives); SM is the sum modulo 10.
            parent = np.repeat(np.arange(len(first), dtype=np.int32) * 10, level.arguments)
            in_order = np.sort(parent + below_value) - parent
            low = in_order[first + (level.arguments - 1) // 2]
            median = (low + in_order[first + level.arguments // 2]) // 2
            total = np.add.reduceat(below_value, first, dtype=np.int32) % 10
            results = (in_order[first], in_order[first + level.arguments - 1], median, total)
            value[level.at] = np.choose(level.operator, results)
        sizes.append(size)
        values.append(value)
        below_size, below_value = size, value
    return sizes[::-1], values[::-1]


def _before(lengths: ndarray) -> ndarray:
    """Return the start of each of these segments when they are concatenated."""
    return np.cumsum(lengths, dtype=np.int32) - lengths
