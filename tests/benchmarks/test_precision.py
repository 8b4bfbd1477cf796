"""Attention that learns over short sequences, on a CPU with bf16: in fp32, as trainings take it, against torch's own
autocast. In turns, by processor time, forward and backward. Run with

    OMP_NUM_THREADS=1 pytest -o addopts= -m benchmark -s tests/benchmarks/test_precision.py
"""

from __future__ import annotations

import statistics
import time

import pytest
import torch
from torch.nn import functional as F

from leansurgeon.measure.costs.precision import autocast, has_bf16

TURNS = 15


def seconds(context, shape: tuple[int, ...]) -> float:
    given = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    start = time.process_time()
    with context:
        out = F.scaled_dot_product_attention(*given)
    out.float().sum().backward()
    return time.process_time() - start


@pytest.mark.benchmark
@pytest.mark.skipif(not has_bf16("cpu"), reason="no bf16")
@pytest.mark.parametrize("shape", [(64, 12, 24, 32), (64, 12, 56, 32), (64, 9, 64, 64)], ids=str)
def test_attention_in_fp32_is_faster(shape):
    pairs = [
        [seconds(each, shape) for each in (autocast("bf16", "cpu"), torch.autocast("cpu", torch.bfloat16))]
        for _ in range(TURNS)
    ]
    ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"{shape}: {1000 * ours:.1f} ms, torch's autocast {1000 * theirs:.1f} ms: {theirs / ours:.1f} times")
    assert ours < theirs
