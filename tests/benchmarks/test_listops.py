"""Speed of ListOps generation: at least 8 times the published way of generating and discarding, per core.

Both in this process and on one core, CPU time per kept expression of the published setting (depth 10, 10 arguments,
500 < length < 2000), turn by turn in one run: 5 rounds of 40 expressions the plain way and 4 x 320 ours, medians
compared. `pytest -m benchmark -s` prints them.
"""

from __future__ import annotations

import random
import statistics
import time

import pytest

from leansurgeon.tasks.long_range.listops import Grammar, chunk

ROUNDS, PLAIN, CHUNKS = 5, 40, 4


def plain_tree(rng: random.Random, grammar: Grammar, depth: int) -> tuple[object, int]:
    """The published algorithm as it is described: build the whole tree, count as you go."""
    if depth >= grammar.max_depth or rng.random() > 0.25:
        return rng.randrange(10), 1
    arguments, length = [], 2
    for _ in range(rng.randint(2, grammar.max_args)):
        tree, tokens = plain_tree(rng, grammar, depth + 1)
        arguments.append(tree)
        length += tokens
    return (rng.choice(("MIN", "MAX", "MED", "SM")), arguments), length


def plain_value(tree) -> int:
    if isinstance(tree, int):
        return tree
    values = sorted(plain_value(argument) for argument in tree[1])
    middle = (values[(len(values) - 1) // 2] + values[len(values) // 2]) // 2
    return {"MIN": values[0], "MAX": values[-1], "MED": middle, "SM": sum(values) % 10}[tree[0]]


def plain_symbols(tree, symbols: list[str]) -> None:
    if isinstance(tree, int):
        symbols.append(str(tree))
        return
    symbols.append("[" + tree[0])
    for argument in tree[1]:
        plain_symbols(argument, symbols)
    symbols.append("]")


def plain_samples(rng: random.Random, grammar: Grammar, wanted: int) -> list[tuple[list[str], int]]:
    samples = []
    while len(samples) < wanted:
        tree, length = plain_tree(rng, grammar, 1)
        if grammar.min_length < length < grammar.max_length:
            symbols: list[str] = []
            plain_symbols(tree, symbols)
            samples.append((symbols, plain_value(tree)))
    return samples


@pytest.mark.benchmark
def test_generation_is_at_least_eight_times_faster_per_core():
    grammar, rng = Grammar(), random.Random(0)
    chunk(grammar, 1, 0)  # warm
    plain, ours = [], []
    for turn in range(ROUNDS):
        begun = time.process_time()
        plain_samples(rng, grammar, PLAIN)
        plain.append((time.process_time() - begun) / PLAIN)
        begun = time.process_time()
        made = sum(len(chunk(grammar, 2, turn * CHUNKS + i).lengths) for i in range(CHUNKS))
        ours.append((time.process_time() - begun) / made)
    ratio = statistics.median(plain) / statistics.median(ours)
    print(
        f"\nListOps, CPU ms per kept expression: plain {1e3 * statistics.median(plain):.2f}, "
        f"ours {1e3 * statistics.median(ours):.3f}, ratio {ratio:.0f}"
    )
    assert ratio >= 8
