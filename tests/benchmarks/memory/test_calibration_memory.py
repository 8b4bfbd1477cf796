"""What a calibration holds in memory: blocks and activations, not models.

A synthetic Llama of 1.3 GB (48 layers, width 1024, fp32; LEANSURGEON_LAYERS=200 makes it 4.8 GB) loses half its layers
and a quarter of its MLP units on random token ids, so that every tensor of every MLP that is left is made anew, in a
process of its own whose anonymous memory is looked at every 5 ms. What it holds beyond torch has to be less than half
a copy of the model; whoever needed source and result at once would hold nearly one and a half. Run with
`OMP_NUM_THREADS=1 pytest -o addopts= -m benchmark -s tests/benchmarks/memory/test_calibration_memory.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from tests.benchmarks.memory import large
from tests.benchmarks.streaming_models import llama
from tests.benchmarks.test_streaming import anonymous

CUT = """
import sys
import torch
from leansurgeon.checkpoints.source import open_source
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.surgery.calibrate import calibrate
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape

source = open_source(sys.argv[1])
ids = torch.randint(0, 20_000, (3, 1, 128), generator=torch.Generator().manual_seed(0))
fit, guard, held = ([{"input_ids": x, "attention_mask": torch.ones_like(x)}] for x in ids)
calibration = Calibration("noise", "noise", "-", fit, guard, held)
method = Method(layers="even", heal="closed")
steps = plan(source, RequestedShape(layers=sys.argv[2], mlp_dim="384"), 0, method, calibrated=True)
outcome = calibrate(steps, calibration)
print(len(outcome.record.layers), len(outcome.edits))
outcome.close()
"""


@pytest.mark.benchmark
def test_a_model_of_which_two_copies_do_not_fit_can_be_calibrated(tmp_path):
    layers = int(os.environ.get("LEANSURGEON_LAYERS", "48"))
    # Narrow MLPs: the time of a refit grows with the third power of their width, and the memory is what matters here.
    folder = llama(tmp_path / "source", num_hidden_layers=layers, intermediate_size=512)
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
    # At least three tensors of every MLP are made anew, and none of them may stay in memory.
    assert said.split()[0] == str(layers // 2) and int(said.split()[1]) >= 3 * (layers // 2)
    shutil.rmtree(folder)
    print(f"\nmodel {size / 1e9:.2f} GB; " + ", ".join(f"{k}: {v / 1e6:.0f} MB" for k, v in peaks.items()))
    assert peaks["calibration"] < size / 2 + peaks["torch alone"]


@pytest.mark.slow
def test_the_command_for_large_models_measures(tmp_path, capsys):
    large.main(["--size", "tiny", "--lose", "2", "--tokens", "256", "--folder", str(tmp_path)])
    found = json.loads(capsys.readouterr().out.splitlines()[0])
    assert found["layers"] == 4 and 0 < found["anonymous"] <= found["peak"] < found["machine"]
    assert [f.name for f in tmp_path.iterdir()] == ["llama-tiny"] and found["disk"] > 0
