"""Variables of a group that is not there: said at once, ended by a signal, and no business of one process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.support.models import strangers


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("meeting")
    return strangers.model(folder / "source", "llama"), strangers.texts(folder / "data")


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        yield str(free.getsockname()[1])


def retrain(model, tmp_path, **said):
    source, data = model
    command = ["retrain", source, "--data", data, "-o", tmp_path / "run", "--set", "train.duration=2st"]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC")} | said
    return subprocess.Popen(
        [sys.executable, "-m", "leansurgeon", *map(str, command)],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize(("rank", "number"), [("0", signal.SIGINT), ("1", signal.SIGTERM)])
def test_a_process_that_waits_says_for_whom_and_a_signal_ends_it(rank, number, model, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    said = {"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    process = retrain(model, tmp_path, **said)
    heard = ""
    for line in process.stderr:
        heard += line
        if "unset" in heard:
            break
    text = " ".join(heard.split())
    assert f"Process {rank} of 2 waits" in text and f"127.0.0.1:{port}" in text and "WORLD_SIZE=2" in text
    began = time.monotonic()
    process.send_signal(number)
    _, rest = process.communicate(timeout=30)
    assert time.monotonic() - began < 3  # a second, and the end of a process on a busy machine
    assert process.returncode in (130, 143) and "Traceback" not in rest
    assert not (tmp_path / "run").exists()


def test_one_process_meets_nobody(model, tmp_path):
    said = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "29500"}
    process = retrain(model, tmp_path, **said)
    _, text = process.communicate(timeout=120)
    assert process.returncode == 0, text


def test_a_port_in_use_and_an_unknown_host_are_sentences(model, tmp_path, port):
    said = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    process = retrain(model, tmp_path, **said)
    _, text = process.communicate(timeout=60)
    words = " ".join(text.split())
    assert process.returncode == 1 and f"port {port} is in use" in words and "Traceback" not in text, text
    process = retrain(model, tmp_path, WORLD_SIZE="2")
    _, text = process.communicate(timeout=60)
    assert process.returncode == 2 and "WORLD_SIZE=2" in text and "Traceback" not in text, text
