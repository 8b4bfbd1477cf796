"""How fast one core makes batches of a packed token file: causal windows, and windows with hidden tokens.

Tokens per second of this thread's CPU time, best of several rounds, from a file larger than the processor's cache. Run
with `OMP_NUM_THREADS=1 pytest -o addopts= -m benchmark -s tests/benchmarks/test_token_file.py`.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from leansurgeon import tasks

TOKENS, ROUNDS, BATCHES = 20_000_000, 7, 40
CLAIM = 100e6  # tokens a second


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A table of token ids, as the makers of Crammed BERT ship theirs: nothing has to be tokenised."""
    import pyarrow as pa
    from pyarrow import parquet

    folder = tmp_path_factory.mktemp("tokens")
    ids = np.random.default_rng(0).integers(5, 2000, (TOKENS // 1000, 1000), dtype=np.int32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(ids.reshape(-1)), 1000).cast(pa.list_(pa.int32()))
    parquet.write_table(pa.table({"input_ids": column}), folder / "ids.parquet")
    words = tasks.make("causal-lm", {"tokenizer": "bpe", "vocab_size": 2048})
    words.prepare(folder / "cache", None, workers=1, say=lambda text: None)
    words.tokenizer().save_pretrained(folder / "tokenizer")
    return folder


@pytest.mark.benchmark
@pytest.mark.parametrize("name", ["causal-lm", "masked-lm"])
def test_one_core_serves_tokens(name, rows):
    options = {"data": str(rows / "ids.parquet"), "text": "input_ids", "tokenizer": str(rows / "tokenizer")}
    found = {}
    for width, count in ((128, 128), (1024, 16)):
        task = tasks.make(name, {**options, "seq_len": width})
        task.prepare(rows / "cache", None, workers=1, say=lambda text: None)
        order = np.random.default_rng(1).permutation(task.size("train"))[: BATCHES * count].reshape(BATCHES, count)
        best = float("inf")
        for _ in range(ROUNDS):
            start = time.thread_time()
            for indices in order:
                task.batch("train", indices, seed=0, epoch=0)
            best = min(best, time.thread_time() - start)
        found[f"{count} x {width}"] = BATCHES * count * width / best
    shown = ", ".join(f"{speed / 1e6:.0f} M tokens/s in batches of {shape}" for shape, speed in found.items())
    print(f"\n{name}, one core: {shown}")
    assert min(found.values()) >= CLAIM
