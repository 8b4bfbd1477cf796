"""How long a prediction of training memory takes in a fresh process, imports and all: at most 5 s of processor time.

    OMP_NUM_THREADS=1 pytest tests/benchmarks/test_prediction_time.py -m benchmark -o addopts= -s

Processor time and not the clock, since others may use the machine; the clock is printed, too.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

import pytest

CODE = """
import sys
from leansurgeon.checkpoints.source import open_source
from leansurgeon.measure.memory import Setting, predict
source = open_source(sys.argv[1])
print(predict(source.config, source.architecture, Setting(batch=128)).total)
"""


@pytest.mark.benchmark
@pytest.mark.parametrize("source", ["vit-b", "bert-crammed"])
def test_a_prediction_takes_at_most_five_seconds(source):
    seconds, clock = [], []
    for _ in range(3):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run([sys.executable, "-c", CODE, source], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        clock.append(time.perf_counter() - start)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    print(f"\n{source}: {min(seconds):.2f} s of processor time (best of 3), {min(clock):.2f} s by the clock")
    assert min(seconds) <= 5
