"""Programs that make the chunks of a generated data set, several side by side.

A chunk depends on its number only, so the number of programs changes nothing but the time. They are started as
programs of their own: a fork would copy the threads' locks of whatever the caller has imported, and a spawned worker
would import the caller's script again. Their pipes hold them back when the reader is slower.
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
    """Chunks 0, 1, 2, ... without end, each `make(*given, number)`: made here, or by `workers` programs that take
    turns. `make` is a function of a module. Raises `LeanSurgeonError` where a program ends early.
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
    """Such a program: it writes one chunk after the other until nobody reads them any more."""
    make, given, first, step = pickle.loads(bytes.fromhex(sys.argv[1]))
    try:
        for number in itertools.count(first, step):
            pickle.dump(make(*given, number), sys.stdout.buffer)
            sys.stdout.buffer.flush()
    except (BrokenPipeError, KeyboardInterrupt):
        # Nobody reads any more; give the interpreter something that it can flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
