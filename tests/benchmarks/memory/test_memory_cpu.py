"""Predicted training memory against what the CPU's allocator hands out, as torch's profiler logs it.

    OMP_NUM_THREADS=1 pytest tests/benchmarks/memory/test_memory_cpu.py -m benchmark -o addopts= -s

ViT, BERT and GPT-2 of two blocks, by batch, heads, attention and precision: a real model takes two real training steps
(`test_memory_gpu.real_step`) while the profiler, which nobody here wrote, logs every allocation, those inside kernels
too. The prediction is made with the CPU's rules. So this tries the count of tensors, of their lives and of the moment
of the peak, and not what CUDA does otherwise (`cuda_rules.py`): for that, `test_memory_gpu.py` waits for a GPU. The
table is kept in examples/results/memory.md. Fails where a prediction is more than 5 % low.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from leansurgeon.measure.costs.memory import Rehearsal, Setting, choose_attention, make_optimizer
from leansurgeon.measure.costs.speed import random_model
from leansurgeon.measure.data import inputs
from tests.benchmarks.memory.test_memory_gpu import LOW, Point, real_step, shaped, table

CPU = torch.device("cpu")
TOKENS = {"vit": 1, "bert": 64, "gpt2": 64}
BATCHES = {"vit": (1, 3), "bert": (4, 16), "gpt2": (4, 16)}
POINTS = [
    Point(model, batch, heads, attention, precision)
    for model, (small, large) in BATCHES.items()
    for batch, heads, precision in ((small, 12, "fp32"), (small, 24, "fp32"), (large, 12, "fp32"), (large, 12, "bf16"))
    for attention in ("sdpa", "eager")
]


def allocated(config, family, setting: Setting) -> int:
    """Most bytes that the CPU's allocator had handed out at once in the second of two training steps."""

    def batch(setting: Setting):
        return inputs.make(config, family, setting.batch, setting.tokens, CPU)

    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        model = random_model(config, family).train()
        choose_attention(model, setting.attention)
        optimizer = make_optimizer(model.parameters(), setting.optimizer)
        real_step(model, setting, batch, CPU, optimizer)
        with torch.profiler.record_function("second step"):
            real_step(model, setting, batch, CPU, optimizer)
    events = found.profiler.kineto_results.events()
    start = next(event.start_ns() for event in events if event.name() == "second step")
    level = most = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        level += event.nbytes()
        most = max(most, level) if event.start_ns() >= start else level
    return most


@pytest.mark.benchmark
def test_predictions_against_the_allocator_of_the_cpu():
    rows = []
    for point in POINTS:
        config, family = shaped(point.model, point.heads, tiny=True)
        setting = Setting(point.batch, TOKENS[point.model], precision=point.precision, attention=point.attention)
        predicted = Rehearsal(config, family, setting, cuda=False).peak().total
        real = allocated(config, family, setting)
        rows.append((point, predicted, (real, real)))  # this allocator hands out what it is asked for
        print(table(rows[-1:]).splitlines()[1], flush=True)
    print(f"\ntorch {torch.__version__} on a CPU, MiB\n" + table(rows))
    errors = [predicted / real - 1 for _, predicted, (real, _) in rows]
    print(f"worst: {100 * min(errors):+.1f} % and {100 * max(errors):+.1f} % of {len(rows)}")
    assert min(errors) >= LOW
