"""Commands that are killed at a random moment, and what may lie there afterwards.

Commands run in forked processes, which costs a tenth of a second instead of ten: torch is imported already.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import timm
import torch
import transformers
from transformers import ViTForImageClassification  # noqa: F401 (once for every forked process)

import leansurgeon.training.loop  # noqa: F401
from leansurgeon.checkpoints import digests, record
from leansurgeon.checkpoints.proof import prove
from leansurgeon.checkpoints.record import Proof
from leansurgeon.checkpoints.weights import Weights
from leansurgeon.cli.main import main
from leansurgeon.reading import jsonfile

assert timm and torch and transformers


@dataclass
class Kills:
    """Kills of one command. `scratch` stands in for the system's temporary folder."""

    command: list[str]
    scratch: Path
    seed: int = 0
    killed: int = 0
    ended: int = 0  # before their moment had come
    seconds: float = 0.0  # of one run to its end
    draws: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.draws = random.Random(self.seed)
        self.scratch.mkdir(exist_ok=True)

    def to_its_end(self) -> int:
        """Run the command undisturbed; its exit code."""
        started = time.monotonic()
        code = os.waitstatus_to_exitcode(os.waitpid(self._start(), 0)[1])
        self.seconds = max(self.seconds, time.monotonic() - started)
        return code

    def kill(self) -> None:
        """Start the command and kill it, with whatever it has started, at a random moment of its life."""
        child, moment = self._start(), time.monotonic() + self.draws.uniform(0, 1.1 * self.seconds)
        while time.monotonic() < moment:
            if os.waitpid(child, os.WNOHANG)[0]:
                self.ended += 1
                return
            time.sleep(0.002)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        self.killed += 1

    def _start(self) -> int:
        child = os.fork()
        if child:
            with suppress(OSError):  # it may be quicker itself
                os.setpgid(child, child)
            return child
        code = 70
        try:
            os.setpgid(0, 0)
            silence = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(silence, stream)
            tempfile.tempdir = str(self.scratch)
            prove.run = stand_in
            sys.argv = ["leansurgeon", *self.command]
            main()
        except SystemExit as end:
            code = end.code or 0
        finally:
            os._exit(code if isinstance(code, int) else 1)


def stand_in(folder: Path, source: Path | None, inputs: Path | None, kind: str, families: object) -> tuple[dict, str]:
    """What a fresh process would say of a result, without the seconds that it takes to import torch."""
    time.sleep(0.05)
    config = jsonfile.read_object(folder / "config.json")
    sizes = [torch.Size(shape).numel() for shape in Weights.open(folder).shapes.values()]
    account = Proof("a stand-in", sum(sizes), output=(1, config.get("hidden_size", 1))).as_dict()
    differences = {"rows": 1, "max_difference": 0.0, "spread": 1.0, "relative_error": 0.0, "cosine": 1.0}
    return {"result": account, "source": account | {"differences": differences}}, ""


def whole(folder: Path, weights: set[str]) -> bool:
    """Whether a result of surgery is there; if it is, all of it: one of these `weights`, and every file it lists."""
    if not folder.exists():
        return False
    made = record.read(folder)
    assert made is not None and made.files, f"{folder} has no record"
    assert all((folder / name).is_file() for name in made.files), f"{folder} lacks files"
    assert {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()} == set(made.files)
    assert digests.digest(folder / "model.safetensors") in weights, f"{folder} holds other weights"
    return True


def many(kills: Kills, count: int, look: Callable[[], None]) -> None:
    """Kill the command `count` times and look after each."""
    while kills.killed < count:
        kills.kill()
        look()
