"""How long a prediction of training memory takes in a fresh process that ends as the command line ends, imports and
all: at most 5 s of processor time. `leansurgeon plan` with its two predictions (as asked for, and in fp32 with eager
attention) is printed beside it.

    OMP_NUM_THREADS=1 pytest tests/benchmarks/memory/test_prediction_time.py -m benchmark -o addopts= -s

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
from leansurgeon.ending import leave
from leansurgeon.measure.costs.memory import Setting, predict
source = open_source(sys.argv[1])
print(predict(source.config, source.architecture, Setting(batch=128)).total)
leave(0)
"""


def seconds(*arguments: str) -> tuple[float, float]:
    """Processor time and clock of a fresh Python with these arguments."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, time.perf_counter() - start


@pytest.mark.benchmark
@pytest.mark.parametrize("source", ["vit-b", "bert-crammed"])
def test_a_prediction_takes_at_most_five_seconds(source):
    runs = {
        "a prediction": ("-c", CODE, source),
        "plan --batch 128": ("-m", "leansurgeon", "plan", source, "--batch", "128"),
    }
    rounds = [{name: seconds(*arguments) for name, arguments in runs.items()} for _ in range(3)]
    print(f"\n{source}, best of 3, processor time and clock:")
    for name in runs:
        print(f"{name:18}{min(r[name][0] for r in rounds):6.2f} s {min(r[name][1] for r in rounds):6.2f} s")
    work = min(r["a prediction"][0] for r in rounds)
    assert work <= 5
