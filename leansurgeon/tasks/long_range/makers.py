"""Subprocesses that generate the chunks of a data set in parallel.

A chunk depends only on its number, so the number of processes affects the time alone. They are started as programs of
their own: a fork would copy the locks of threads in whatever the caller has imported, and a spawned worker would import
the caller's script again. Their pipes block them when the reader is slower.
"""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from leansurgeon.errors import LeanSurgeonError
from leansurgeon.version import PACKAGE

Chunk = TypeVar("Chunk")


@contextmanager
def chunks(make: Callable[..., Chunk], given: tuple[Any, ...], workers: int) -> Iterator[Iterator[Chunk]]:
    """Yield chunks 0, 1, 2, ... without end, each `make(*given, number)`, made here or by `workers` processes in turn.

    `make` is a module-level function. Raises `LeanSurgeonError` if a process ends early.
    """
    if workers <= 1:
        yield (make(*given, number) for number in itertools.count())
        return
    path = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, pickle.dumps((make, given, first, workers)).hex()],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        for first in range(workers)
    ]

    def read(process: subprocess.Popen) -> Chunk:
        try:
            return pickle.load(process.stdout)
        except (EOFError, pickle.UnpicklingError):
            code = process.wait()
            name = make.__module__.rpartition(".")[2]
            raise LeanSurgeonError(
                f"A process that makes data ({name}) ended with code {code} (python: {sys.executable})."
            ) from None

    try:
        yield (read(processes[number % workers]) for number in itertools.count())
    finally:
        for process in processes:
            process.kill()
            with suppress(OSError):
                process.stdout.close()
            process.wait()


def main() -> None:
    """Run a worker process: write chunks until nobody reads them."""
    make, given, first, step = pickle.loads(bytes.fromhex(sys.argv[1]))
    try:
        for number in itertools.count(first, step):
            pickle.dump(make(*given, number), sys.stdout.buffer)
            sys.stdout.buffer.flush()
    except (BrokenPipeError, KeyboardInterrupt):
        # The reader is gone; give the interpreter something that it can flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
