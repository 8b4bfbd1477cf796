"""Predicted memory against peaks of CUDA's allocator that others measured on real GPUs (`support/published_memory.py`).

    pytest tests/benchmarks/memory/test_memory_published.py -m benchmark -o addopts= -s

28 points of BERT on an A100 and DistilBERT on an RTX 2060: batch, tokens, eager and fused attention. Prints the table
that is kept in examples/results/memory.md, and fails where the count is more than 5 % off.
"""

from __future__ import annotations

import pytest
import torch
import transformers

from tests.support.published_memory import GPU, PUBLISHED, counted


@pytest.mark.benchmark
def test_counts_against_published_peaks_of_real_gpus():
    print(f"\nours: torch {torch.__version__}, transformers {transformers.__version__}; MB\n")
    print("| model | measured on | batch | tokens | attention | ours | published | error |")
    print("|---|---|---|---|---|---|---|---|")
    errors = []
    for point in PUBLISHED:
        for attention in ("eager", "sdpa"):
            ours, real = counted(point, attention), getattr(point, attention)
            errors.append(ours / real - 1)
            where = f"{point.model} | {GPU[point.model]} | {point.batch} | {point.tokens} | {attention}"
            print(f"| {where} | {ours:,.0f} | {real:,.0f} | {100 * errors[-1]:+.1f} % |")
    print(f"\n{len(errors)} points: {100 * min(errors):+.1f} % to {100 * max(errors):+.1f} %")
    assert max(map(abs, errors)) <= 0.05
