"""A call leaves the process that it works in as it was, and several calls do not meet."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import queue
import random
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

import leansurgeon
from leansurgeon.checkpoints.blockwise.skeleton import build_on_meta
from leansurgeon.checkpoints.source import open_source
from leansurgeon.commands import host
from tests.support.models import strangers

SHORT = {"train.duration": "2st", "train.batch": 4}


@pytest.fixture
def decoder(tmp_path):
    """A small Llama with a tokenizer, and texts."""
    return strangers.model(tmp_path / "source", "llama"), strangers.texts(tmp_path / "data")


def draws() -> list[float]:
    return [torch.rand(1).item(), np.random.rand(), random.random()]


def seed() -> None:
    torch.manual_seed(5), np.random.seed(5), random.seed(5)


def test_generators_environment_precision_and_accelerate_are_as_they_were(decoder, tmp_path, monkeypatch):
    source, data = decoder
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    AcceleratorState._reset_state(reset_partial_state=True)  # of commands that other tests typed in this process
    GradientState._reset_state()
    mine = Accelerator(cpu=True, gradient_accumulation_steps=3)
    torch.set_float32_matmul_precision("high")
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()
    try:
        seed()
        expected = draws()
        seed()
        before = dict(os.environ), *(dict(kind._shared_state) for kind in (AcceleratorState, PartialState))
        precision = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        how = {"uncalibrated": True, "proof": False, "out": tmp_path / "lean"}
        lean = leansurgeon.shrink(source, layers=2, progress=lambda _: draws(), **how)
        leansurgeon.heal(lean, data, set=SHORT, out=tmp_path / "run", progress=lambda _: draws())
        assert lean.model is lean.model
        assert draws() == expected
        assert before == (dict(os.environ), *(dict(kind._shared_state) for kind in (AcceleratorState, PartialState)))
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == precision
        assert mine.mixed_precision == "bf16" and GradientState().num_steps == 3
        assert transformers.logging.get_verbosity() == logging.WARNING
    finally:
        torch.set_float32_matmul_precision("highest")
        transformers.logging.set_verbosity(level)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def test_calls_in_threads_all_work(decoder):
    source, _ = decoder
    own = torch.nn.Module.register_parameter
    level = transformers.logging.get_verbosity()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        plans = list(pool.map(lambda n: leansurgeon.plan(source, layers=n, memory=True), (1, 2)))
    assert [found.after.shape.depth for found in plans] == [1, 2]
    assert torch.nn.Module.register_parameter is own and transformers.logging.get_verbosity() == level


def test_skeletons_are_built_in_one_thread_alone(decoder, monkeypatch):
    """A layer that the host makes meanwhile is a real one."""
    opened = open_source(str(decoder[0]))
    devices = []

    def make_layer():
        devices.append(torch.nn.Linear(2, 2).weight.device.type)

    real = transformers.LlamaForCausalLM.__init__

    def slow(self, *args, **kwargs):
        other = threading.Thread(target=make_layer)
        other.start()
        other.join()
        real(self, *args, **kwargs)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "__init__", slow)
    model = build_on_meta(opened.config, opened.architecture)
    assert devices == ["cpu"] and all(p.is_meta for p in model.parameters())


def test_a_call_says_that_it_waits_for_another(decoder, tmp_path):
    source, _ = decoder
    heard = queue.Queue()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with host.leave_process_alone(heard.put):
            how = {"layers": 2, "uncalibrated": True, "proof": False}
            waiting = pool.submit(leansurgeon.shrink, source, out=tmp_path / "lean", progress=heard.put, **how)
            assert "waiting" in heard.get(timeout=120) and not waiting.done()
        assert waiting.result().after.depth == 2


def test_a_fork_does_not_wait_for_threads_that_it_has_not_got(decoder):
    script = (
        "import os, threading, leansurgeon\n"
        "from leansurgeon.commands import host\n"
        "inside, go = threading.Event(), threading.Event()\n"
        "def hold():\n"
        "    with host.leave_process_alone(print):\n"
        "        inside.set(), go.wait()\n"
        "threading.Thread(target=hold, daemon=True).start(), inside.wait()\n"
        "child = os.fork()\n"
        "if not child:\n"
        f"    leansurgeon.plan({str(decoder[0])!r}, layers=2)\n"
        "    os._exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])), go.set()\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "7", run.stderr


def test_many_cuts_leave_memory_where_it_was(decoder, tmp_path):
    """In a process of its own; what the libraries load at first comes before."""
    script = (
        "import gc, os, sys, leansurgeon\n"
        "def held():\n"
        "    gc.collect()\n"
        "    return int(open('/proc/self/statm').read().split()[1]) * os.sysconf('SC_PAGE_SIZE')\n"
        "how = dict(layers=2, uncalibrated=True, proof=False, progress=False, force=True, out=sys.argv[2])\n"
        "for call in range(8):\n"
        "    leansurgeon.shrink(sys.argv[1], **how)\n"
        "    first = held() if call == 3 else first if call > 3 else 0\n"
        "print(held() - first)\n"
    )
    run = [sys.executable, "-c", script, str(decoder[0]), str(tmp_path / "lean")]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and int(done.stdout) < 2e6, (done.stdout, done.stderr)
