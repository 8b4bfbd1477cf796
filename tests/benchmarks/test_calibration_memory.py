"""What a calibration holds in memory: blocks and activations, not models.

A synthetic Llama of 1.4 GB in fp32 (24 layers, width 1024; LEANSURGEON_LAYERS=96 makes it 5.2 GB) is cut to half its
layers on random token ids, in a process of its own whose anonymous memory is looked at every 5 ms. Whoever needed the
source and the result at once would hold one and a half copies. Run with
`OMP_NUM_THREADS=1 pytest -o addopts= -m benchmark -s tests/benchmarks/test_calibration_memory.py`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

import pytest

from tests.benchmarks.streaming_models import llama
from tests.benchmarks.test_streaming import anonymous

CUT = """
import sys
import torch
from leansurgeon.checkpoints.source import open_source
from leansurgeon.measure.calibration import Calibration
from leansurgeon.surgery.calibrated import Options, calibrate
from leansurgeon.surgery.plan import plan
from leansurgeon.surgery.wanted import Wanted

source = open_source(sys.argv[1])
ids = torch.randint(0, 20_000, (3, 1, 128), generator=torch.Generator().manual_seed(0))
fit, guard, held = ([{"input_ids": x, "attention_mask": torch.ones_like(x)}] for x in ids)
calibration = Calibration("noise", "noise", "-", fit, guard, held)
steps = plan(source, Wanted(layers=sys.argv[2]), calibrated=True)
outcome = calibrate(steps, source, calibration, Options(criterion="even"))
print(len(outcome.layers), len(outcome.edits))
outcome.close()
"""


@pytest.mark.benchmark
def test_a_model_of_which_two_copies_do_not_fit_can_be_calibrated(tmp_path):
    layers = int(os.environ.get("LEANSURGEON_LAYERS", "24"))
    folder = llama(tmp_path / "source", num_hidden_layers=layers)
    size = sum(f.stat().st_size for f in folder.iterdir())
    peaks = {}
    for name, command in (
        ("torch alone", [sys.executable, "-c", "import torch, transformers"]),
        ("calibration", [sys.executable, "-c", CUT, str(folder), str(layers // 2)]),
    ):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        peaks[name] = 0
        while process.poll() is None:
            peaks[name] = max(peaks[name], anonymous(process.pid))
            time.sleep(0.005)
        said = process.stdout.read()
        assert process.returncode == 0
    assert said.split()[0] == str(layers // 2) and int(said.split()[1]) > 0
    shutil.rmtree(folder)
    print(f"\nmodel {size / 1e9:.2f} GB; " + ", ".join(f"{k}: {v / 1e6:.0f} MB" for k, v in peaks.items()))
    assert peaks["calibration"] < size / 2 + peaks["torch alone"]
