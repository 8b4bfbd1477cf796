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


IMPORTS = {"vit-b": "import torch, timm, accelerate", "bert-crammed": "import torch, transformers, accelerate"}


def seconds(*arguments: str) -> tuple[float, float]:
    """Processor time and clock of a fresh Python."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-c", *arguments], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, time.perf_counter() - start


@pytest.mark.benchmark
@pytest.mark.parametrize("source", IMPORTS)
def test_a_prediction_takes_at_most_five_seconds(source):
    rounds = [(seconds(CODE, source), seconds(IMPORTS[source])) for _ in range(3)]
    work, clock = min(r[0][0] for r in rounds), min(r[0][1] for r in rounds)
    imports = min(r[1][0] for r in rounds)
    print(
        f"\n{source}: {work:.2f} s of processor time (best of 3; {imports:.2f} s of it are the libraries' imports), "
        f"{clock:.2f} s by the clock"
    )
    assert work <= 5
