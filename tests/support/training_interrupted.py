"""A training of the stand-in with everything that has a state or a random number in it, and ways to interrupt it.

Processes are forked here, which takes a tenth of a second instead of ten: torch is there already.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import accelerate.tracking  # noqa: F401  (all that a training imports, once for every forked process)
import numpy as np
import timm.data
import timm.optim
import timm.utils  # noqa: F401
import torch
import torch.distributed
import torch.nn.parallel
from torch import nn

from leansurgeon.errors import LeanSurgeonError
from leansurgeon.training.loop import train
from leansurgeon.training.runs import checkpoint
from tests.support.patience import working_until
from tests.support.processes import forks  # noqa: F401  (its first backward pass)
from tests.support.training_standin import Dots, StandIn, recipe

SETTINGS = {
    "duration": "16st",
    "batch": 16,
    "micro_batch": 4,
    "eval": {"every": "4st", "batch": 2},
    "log_every": 3,
    "ema": {"decay": 0.8},
    "mixup": 0.4,
    "cutmix": 1.0,
    "label_smoothing": 0.1,
    "checkpoint": {"every": "3st", "keep_last": 2},
    "schedule": {"name": "one-cycle", "warmup": 0.25},
}


class Pictures(Dots):
    """Images of 4 x 4 with noise from (seed, epoch, index); `before` is called with the split before every batch."""

    def __init__(self, before: Callable[[str], None] = lambda split: None) -> None:
        super().__init__()
        self._before = before

    def batch(self, split, indices, *, seed, epoch):
        self._before(split)
        batch = super().batch(split, indices, seed=seed, epoch=epoch)
        images = batch["pixel_values"].reshape(-1, 1, 4, 4)
        if split == "train":
            noise = [np.random.default_rng([seed, epoch, int(i)]).standard_normal((1, 4, 4)) for i in indices]
            images = images + 0.1 * torch.from_numpy(np.stack(noise).astype(np.float32))
        return {"pixel_values": images, "labels": batch["labels"]}

    def model_overrides(self):
        return {"num_labels": 3}


def picture_model() -> StandIn:
    torch.manual_seed(0)
    layers = nn.Flatten(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 3)
    return StandIn(nn.Sequential(*layers), "pixel_values")


def run(folder: Path, before: Callable[[str], None] = lambda split: None, resume: str = "never", **settings) -> dict:
    whole = recipe(**(SETTINGS | settings))
    task, model = Pictures(before), picture_model()
    options = {"loaded": model, "task": task, "cpu": True, "say": lambda t: None, "resume": resume}
    return train(whole, folder, folder / "run", **options).as_dict()


class Interrupter:
    """Send this process a signal at the `count`-th training or evaluation batch or the `count`-th save of `rank`."""

    def __init__(self, where: str, count: int, number: int, rank: int = 0) -> None:
        self.where, self.count, self.number, self.rank = where, count, number, rank
        self.seen = 0

    def __call__(self, split: str) -> None:
        self.at(split)

    def at(self, place: str) -> None:
        if place == self.where and int(os.environ.get("RANK", "0")) == self.rank:
            self.seen += 1
            if self.seen == self.count:
                os.kill(os.getpid(), self.number)
                time.sleep(0.05)


def interrupted(folder: Path, where: str, count: int, number: int, rank: int, resume: str, settings: dict) -> None:
    """Body of one process: train until the signal comes; ends with the exit code of the error."""
    interrupter = Interrupter(where, count, number, rank)
    if where == "save":
        checkpoint.digest, old = (lambda file: (interrupter.at("save"), old(file))[1]), checkpoint.digest
    try:
        run(folder, interrupter, resume, **settings)
    except LeanSurgeonError as error:
        (folder / f"said-{os.environ.get('RANK', '0')}").write_text(str(error))
        sys.exit(error.exit_code)


def processes(count: int, body: Callable, *arguments, patience: float = 60) -> list[int]:
    """Run `body` in `count` processes of one gloo group; their exit codes (negative: the signal that ended them). Those
    that do nothing for `patience` seconds, or work longer than that, are killed (see `patience`).
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=_one, args=(rank, count, port, body, arguments)) for rank in range(count)]
    for process in started:
        process.start()
    # Not `join`: it would wait for the children of a process, too.
    working_until(lambda: not any(p.is_alive() for p in started), [p.pid for p in started], patience)
    for process in started:
        if process.is_alive():  # it waits for one that is gone
            process.kill()
            process.join()
    return [process.exitcode for process in started]


def _one(rank: int, count: int, port: int, body: Callable, arguments: tuple) -> None:
    torch.set_num_threads(1)
    if count > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(count)}
    body(*arguments)


def told(folder: Path) -> list[dict]:
    """metrics.jsonl without what a clock says."""
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in ("step_ms", "data_wait")} for row in rows]


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return torch.load(folder / "run" / name / "weights.pt", weights_only=True)


def numbers(folder: Path) -> dict:
    """What summary.json says of the result."""
    summary = json.loads((folder / "run" / "summary.json").read_text())
    return {key: summary[key] for key in ("before", "final", "best", "steps", "epochs", "left_out_steps")}


def assert_same(one: Path, other: Path) -> None:
    """Two trainings have told the same, and left the same weights to the last bit."""
    assert told(one) == told(other)
    assert numbers(one) == numbers(other)
    for name in ("model", "last"):
        a, b = weights(one, name), weights(other, name)
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a), name


KILL, TERM, USR1, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
