"""Variables of a group that is not there: said at once, ended by a signal, and no business of one process."""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.models import strangers
from tests.support.patience import working_until
from tests.support.processes.forks import Fork, commanded


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("meeting")
    return strangers.model(folder / "source", "llama"), strangers.texts(folder / "data")


@contextmanager
def taken_port() -> Iterator[str]:
    """A port that nobody else has; it is free again behind this."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield str(taken.getsockname()[1])


@pytest.fixture
def retrain(model, tmp_path, monkeypatch):
    """The command, where these variables are set."""
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC")]:
        monkeypatch.delenv(name)

    def begin(**said: str) -> Fork:
        with monkeypatch.context() as patch:
            for name, value in said.items():
                patch.setenv(name, value)
            words = ("--data", model[1], "-o", tmp_path / "run", "--set", "train.duration=2st")
            return commanded("retrain", model[0], *words, cwd=tmp_path)

    return begin


@pytest.mark.parametrize(("rank", "number"), [("0", signal.SIGINT), ("1", signal.SIGTERM)])
def test_a_process_that_waits_says_for_whom_and_a_signal_ends_it(rank, number, retrain, tmp_path):
    with taken_port() as port:
        pass
    process = retrain(WORLD_SIZE="2", RANK=rank, LOCAL_RANK=rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert working_until(lambda: "unset" in process.heard(), [process.pid])
    text = " ".join(process.heard().split())
    assert f"Process {rank} of 2 waits" in text and f"127.0.0.1:{port}" in text and "WORLD_SIZE=2" in text
    process.send_signal(number)
    code, _, said = process.wait(30)
    assert code in (130, 143) and "Traceback" not in said
    assert not (tmp_path / "run").exists()


def test_one_process_meets_nobody(retrain):
    alone = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "nowhere.invalid"}
    done = retrain(**alone, MASTER_PORT="29500").wait(120)
    assert done.returncode == 0, done.stderr


def test_a_port_in_use_and_an_unknown_host_are_sentences(retrain):
    with taken_port() as port:
        done = retrain(WORLD_SIZE="2", RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port).wait(60)
    words = " ".join(done.stderr.split())
    assert done.returncode == 1 and f"port {port} is in use" in words and "Traceback" not in words, words
    done = retrain(WORLD_SIZE="2").wait(60)
    assert done.returncode == 2 and "WORLD_SIZE=2" in done.stderr and "Traceback" not in done.stderr, done.stderr
