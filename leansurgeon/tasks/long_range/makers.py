"""Programs that make the chunks of a generated data set, several side by side.

A chunk depends on its number only, so the number of programs changes nothing but the time. They are started as
programs of their own: a fork would copy the threads' locks of whatever the caller has imported, and a spawned worker
would import the caller's script again. Their pipes hold them back when the reader is slower.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, TypeVar

from leansurgeon.errors import LeanSurgeonError
from leansurgeon.version import PACKAGE

Chunk = TypeVar("Chunk")


@contextmanager
def chunks(
    here: Callable[[int], Chunk],
    workers: int,
    module: str,
    job: dict[str, Any],
    read: Callable[[BinaryIO], Chunk],
) -> Iterator[Iterator[Chunk]]:
    """Chunks 0, 1, 2, ... without end: made by `here`, or by `workers` programs that take turns.

    A program is `python -m module`, whose `main` calls `serve`; it is given `job`, and `read` takes a chunk from its
    stdout (EOFError where it ends early, which becomes a `LeanSurgeonError`).
    """
    if workers <= 1:
        yield (here(number) for number in itertools.count())
        return
    path = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, json.dumps({"job": job, "first": first, "step": workers})],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        for first in range(workers)
    ]

    def taken(process: subprocess.Popen) -> Chunk:
        try:
            return read(process.stdout)
        except EOFError:
            code = process.wait()
            name = module.rpartition(".")[2]
            raise LeanSurgeonError(
                f"A process that makes data ({name}) ended with code {code} (python: {sys.executable})."
            ) from None

    try:
        yield (taken(processes[number % workers]) for number in itertools.count())
    finally:
        for process in processes:
            process.kill()
            with suppress(OSError):
                process.stdout.close()
            process.wait()


def serve(write: Callable[[BinaryIO, dict[str, Any], int], None]) -> None:
    """Such a program: `write(stdout, job, number)` writes a chunk, again and again until nobody reads them any more."""
    asked = json.loads(sys.argv[1])
    try:
        for number in itertools.count(asked["first"], asked["step"]):
            write(sys.stdout.buffer, asked["job"], number)
    except (BrokenPipeError, KeyboardInterrupt):
        # Nobody reads any more; give the interpreter something that it can flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exactly(stream: BinaryIO, size: int) -> bytes:
    """So many bytes of a program's output. Raises `EOFError` where it ends before."""
    data = stream.read(size)
    if len(data) != size:
        raise EOFError(f"{len(data)} bytes instead of {size}")
    return data
