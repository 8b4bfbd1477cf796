"""Work in a process of its own that costs no import: a fork of the tests' process, where torch is imported already."""

from __future__ import annotations

import atexit
import importlib
import multiprocessing.forkserver
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from leansurgeon.experiment import side_by_side
from tests.support.command_line import Done
from tests.support.processes import proofs

# The first backward pass of a process decides whether another may be forked from it and compute gradients. Behind a
# FakeTensorMode (a memory prediction in a test before) torch would start threads for a GPU that is not there.
torch.ones((), requires_grad=True).backward()


class Fork:
    """`work` in a forked process, in the folder `cwd`: what `subprocess.Popen` is to a program."""

    def __init__(self, work: Callable[[], None], cwd: Path) -> None:
        self._place = tempfile.TemporaryDirectory()
        self._said = [Path(self._place.name, name) for name in ("out", "err")]
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            _be(work, cwd, self._said)

    def poll(self) -> int | None:
        """The exit code (negative: the signal that ended it); None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def heard(self) -> str:
        """What it has said on stderr so far."""
        file = self._said[1]
        return file.read_text() if file.exists() else ""

    def send_signal(self, number: int) -> None:
        """To the process alone, and to none that has its number after it."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float = 300) -> Done:
        """Its exit code and what it has printed, once it has ended. It is killed where that takes too long."""
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                self.send_signal(signal.SIGKILL)
            time.sleep(0.01)
        out, err = (file.read_text() if file.exists() else "" for file in self._said)
        self._place.cleanup()
        return Done(self.returncode, out, err)


def forked(work: Callable[[], None], cwd: Path) -> Done:
    """Do `work` in a forked process, in the folder `cwd`; what it prints, and its exit code."""
    return Fork(work, cwd).wait()


def commanded(*arguments: object, cwd: Path) -> Fork:
    """`leansurgeon` with these arguments, from its entry point to its end."""

    def work() -> None:
        program = importlib.import_module("leansurgeon.__main__")
        sys.modules["__main__"] = program  # what processes that it starts import first
        sys.argv = ["leansurgeon", *map(str, arguments)]
        program.run()

    proofs.start()
    return Fork(work, cwd)


@contextmanager
def trainings_forked() -> Iterator[None]:
    """Trainings of an experiment are forks of the process that starts them: where torch is imported, that takes no
    time.
    """
    with mock.patch.object(side_by_side, "fresh_processes", lambda *_: multiprocessing.get_context("fork")):
        yield


def _be(work: Callable[[], None], cwd: Path, said: list[Path]) -> None:
    """The forked process, to its end: nothing of what the tests' process would do at its own end is done here."""
    code = 1
    try:
        atexit._clear()
        _forget_server()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, file in enumerate(said, 1):
            os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
        # pytest may have put something else in their place
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        os.chdir(cwd)
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _forget_server() -> None:
    """A server of processes that the tests' process has started is not this process's child."""
    server = multiprocessing.forkserver._forkserver
    server._forkserver_pid = server._forkserver_address = server._forkserver_alive_fd = None
    multiprocessing.process._children.clear()
