"""ListOps: the generator against generating functions, enumeration, a plain recursive sampler and an evaluator of
nested lists.
"""

from __future__ import annotations

import itertools
import statistics
from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats

from leansurgeon import tasks
from leansurgeon.errors import UsageError
from leansurgeon.tasks.long_range.listops import SYMBOLS, Grammar, chunk
from tests.tasks.prepared import prepare

PUBLISHED = Grammar()


def drawn(grammar: Grammar, trees: int, seed: int = 0) -> list[tuple[list[str], int]]:
    """(symbols, value) of `trees` expressions of our generator."""
    lots = (chunk(grammar, seed, number) for number in itertools.count())
    samples = ((lot, start, end, value) for lot in lots for start, end, value in _bounds(lot))
    return [
        ([SYMBOLS[i] for i in lot.symbols[start:end]], int(value))
        for lot, start, end, value in itertools.islice(samples, trees)
    ]


def _bounds(lot):
    ends = np.cumsum(lot.lengths)
    return zip(ends - lot.lengths, ends, lot.values, strict=True)


def parsed(symbols: list[str]):
    """Nested lists [operator, argument, ...] or a digit; fails on anything that is not one whole expression."""
    stack: list[list] = [[]]
    for symbol in symbols:
        if symbol == "]":
            done = stack.pop()
            stack[-1].append(done)
        elif symbol.startswith("["):
            stack.append([symbol])
        else:
            stack[-1].append(int(symbol))
    ((expression,),) = stack  # one level left, and in it one expression
    return expression


def evaluated(expression) -> int:
    if isinstance(expression, int):
        return expression
    values = [evaluated(argument) for argument in expression[1:]]
    return {
        "[MIN": lambda: min(values),
        "[MAX": lambda: max(values),
        "[MED": lambda: int(statistics.median(values)),
        "[SM": lambda: sum(values) % 10,
    }[expression[0]]()


def depth_of(expression) -> int:
    return 1 if isinstance(expression, int) else 1 + max(map(depth_of, expression[1:]))


def length_shares(grammar: Grammar) -> np.ndarray:
    """Exact probability of every length below max_length, by generating functions.

    With f_d the power series of the length below level d: f_last(x) = x and f_d = 3/4 x + 1/4 x^2 mean_k f_(d+1)^k.
    """
    size = grammar.max_length
    f = np.zeros(size)
    f[1] = 1
    for _ in range(grammar.max_depth - 1):
        power, total = f, np.zeros(size)
        for _ in range(2, grammar.max_args + 1):
            power = np.convolve(power, f)[:size]
            total += power
        f = np.zeros(size)
        f[2:] = 0.25 * total[:-2] / (grammar.max_args - 1)
        f[1] += 0.75
    return f


@pytest.fixture(scope="module")
def published():
    return drawn(PUBLISHED, 1000)


def test_expressions_are_well_formed_and_their_values_right(published):
    for symbols, value in published:
        expression = parsed(symbols)
        assert 500 < len(symbols) < 2000
        assert value == evaluated(expression)
        assert 2 <= depth_of(expression) <= 10 and most_arguments(expression) <= 10


def test_lengths_follow_the_exact_distribution():
    shares = length_shares(PUBLISHED)[501:]
    # 8.28 % are kept, of mean length 1,035: plain sampling in the facts gave 8.1 % and, from 600 samples, 1,090.
    assert shares.sum() == pytest.approx(0.0828, abs=1e-4)
    assert (shares * np.arange(501, 2000)).sum() / shares.sum() == pytest.approx(1035.0, abs=0.1)

    lengths = np.concatenate([chunk(PUBLISHED, 7, number).lengths for number in range(40)])
    edges = np.searchsorted(np.cumsum(shares) / shares.sum(), np.linspace(0, 1, 31)[1:-1]) + 501
    observed = np.bincount(np.searchsorted(edges, lengths, side="right"), minlength=30)
    cells = np.add.reduceat(shares, np.concatenate(([0], edges - 501)))
    assert stats.chisquare(observed, cells / cells.sum() * len(lengths)).pvalue > 1e-3


MINI = {"train": 1200, "eval": 100, "test": 50, "min_length": 20, "max_length": 100}
prepared = partial(prepare, name="listops", **MINI)


def test_the_number_of_processes_changes_nothing(tmp_path):
    alone, several = (prepared(tmp_path / str(workers), workers=workers) for workers in (1, 3))
    for name in ("tokens", "starts", "labels"):
        assert np.array_equal(alone._array(name), several._array(name))
    other_seed = prepared(tmp_path / "seed", seed=1)
    assert not np.array_equal(alone._array("labels"), other_seed._array("labels"))


def test_splits_are_disjoint_and_nothing_comes_twice(tmp_path):
    task = prepared(tmp_path)
    sizes = {split: task.size(split) for split in task.splits}
    assert sizes == {"train": 1200, "eval": 100, "test": 50}
    batches = [task.batch(split, np.arange(size), seed=0, epoch=0) for split, size in sizes.items()]
    rows = torch.cat([batch["input_ids"] for batch in batches])
    assert len(rows.unique(dim=0)) == 1350


def test_a_batch_holds_padded_tokens_and_the_value(tmp_path):
    task = prepared(tmp_path)
    batch = task.batch("eval", np.array([5, 2, 99]), seed=0, epoch=0)
    assert batch["input_ids"].shape == (3, 128)  # the power of two from max_length up
    for tokens, mask, label in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
        length = int(mask.sum())
        assert 20 < length < 100 and not tokens[length:].any() and tokens.max() < 32
        assert evaluated(parsed([SYMBOLS[token - 1] for token in tokens[:length]])) == label
    assert torch.equal(task.token_mask(batch), batch["attention_mask"] == 1)
    for beyond in (1200, -1):  # the next split's first sample, the file's last
        with pytest.raises(IndexError):
            task.batch("train", np.array([beyond]), seed=0, epoch=0)


def test_small_spaces_are_exhausted_and_then_refused(tmp_path):
    # Depth 2 with 2 or 3 digits: 4 operators x (10^2 + 10^3) = 4,400 expressions, and not one more.
    small = {"max_depth": 2, "max_args": 3, "min_length": 1, "max_length": 6, "eval": 300, "test": 100}
    whole = prepared(tmp_path, **{**small, "train": 4000})
    assert len({whole._array("tokens")[a:b].tobytes() for a, b in itertools.pairwise(whole._array("starts"))}) == 4400
    with pytest.raises(UsageError, match="only 4,400 different expressions"):
        prepared(tmp_path, **{**small, "train": 4001})
    with pytest.raises(UsageError, match="practically no expression"):
        prepared(tmp_path, max_depth=2, max_args=3)


def test_stopping_half_way_leaves_neither_data_nor_processes(tmp_path):
    class Stop(Exception):
        pass

    def say(line):
        if "expressions," in line:  # the last line, when everything is written but not yet in place
            raise Stop

    with pytest.raises(Stop):
        prepared(tmp_path, workers=2, say=say)
    assert list(tmp_path.iterdir()) == []
    assert prepared(tmp_path, workers=2).size("train") == 1200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_length": 500, "max_length": 501}, r"\b500 and 501\b"),
        ({"seq_len": 1000}, r"\bseq_len 1000\b.*\b1999\b"),
        ({"train": 0}, "train"),
        ({"max_dept": 3}, "did you mean 'max_depth'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        tasks.make("listops", options)


def most_arguments(expression) -> int:
    if isinstance(expression, int):
        return 0
    return max(len(expression) - 1, *map(most_arguments, expression[1:]))
