"""Checks that end a training early: non-finite values, and too little memory."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from leansurgeon.errors import Diverged, OutOfMemory, memory_is_short
from leansurgeon.training import distributed, optimizer
from leansurgeon.training.schedule import make_plan
from leansurgeon.training.state import Run, first_batch

MOST_ROLLBACKS = 3
MOST_SKIPPED = 20  # steps in a row
_LEAST_SCALE = 2.0**-10  # of fp16's loss scaler; below it every step was infinite for a long time
LESS = "Try --set train.precision=bf16 or --set train.activation_checkpointing=true, or a smaller model."
PROBED = ("cuda", "xpu")  # kinds of device that raise when they run out of memory


class RollBack(Exception):
    """Raised on all processes alike: return to the newest checkpoint, and skip step `step` (from 0) when it comes
    again.
    """

    def __init__(self, step: int, sentence: str) -> None:
        super().__init__(sentence)
        self.step, self.sentence = step, sentence


def check_finite(run: Run, rows: list[list[float]]) -> list[int]:
    """Check the last steps of a run, given as rows of loss sum, count and gradient norm, and return the steps skipped
    under `nan: skip`.

    Raises `Diverged` or `RollBack` as the recipe says. The rows are sums over all processes, so all of them decide
    alike.
    """
    scaler, train, skipped, first = run.trainer.scaler, run.train, [], run.history.done - len(rows)
    in_a_row = 0  # includes earlier steps: a log window may hold only bad ones
    while first - 1 - in_a_row in run.history.given_up:
        in_a_row += 1
    for step, (loss_sum, _, norm) in enumerate(rows, start=first):
        loss_fine = math.isfinite(loss_sum)
        # In fp16 the scaler searches for the largest scale with finite gradients; it has already skipped that step.
        if loss_fine and (math.isfinite(norm) or scaler):
            in_a_row = 0
            continue
        what = f"The loss is {loss_sum}" if not loss_fine else f"The gradient norm is {norm}"
        of = "" if run.plan.timed else f" of {run.plan.steps}"
        sentence = f"{what} at step {step + 1}{of} (learning rate {run.trainer.lr(step):.3g})."
        if train.nan == "rollback":
            raise RollBack(step, sentence)
        in_a_row += 1
        if train.nan == "stop" or in_a_row > MOST_SKIPPED:
            lr = train.optim.lr
            less = f"Try --set train.optim.lr={lr / 3:.2g}" if lr <= 0.1 else f"Lower train.optim.lr (it is {lr:g})"
            raise Diverged(sentence, f"{less}, a longer warm-up or train.clip_grad.")
        skipped.append(step)
    if scaler and scaler.get_scale() < _LEAST_SCALE:
        raise Diverged(f"The gradients are not finite in fp16 by step {first + len(rows)}.", "Try precision bf16.")
    return skipped


def sound(run: Run) -> bool:
    """Return whether the weights may be saved now: True unless a step since the last log point had non-finite values
    that were applied.
    """
    rows = run.window.rows
    if not rows or run.train.nan == "skip" or run.trainer.scaler:
        return True
    return bool(torch.isfinite(torch.stack([row.to(rows[0].device) for row in rows])).all())


def fit_memory(run: Run) -> None:
    """Halve the micro batch on all processes together until forward and backward fit in memory; the global batch stays.
    Raises `OutOfMemory` if not even the smallest fits.
    """
    train, group = run.train, run.group
    while run.device.type in PROBED and group.largest([not _fits(run)])[0]:
        micro = run.plan.micro
        less = make_plan(train, run.task.size("train"), group.processes, micro_limit=micro // 2, cut_short=True)
        if less.micro >= micro:
            what = f"too little memory for a micro batch of {micro}"
            raise OutOfMemory(f"{distributed.device_name(run.device)} has {what}.", LESS)
        run.say(f"A micro batch of {micro} does not fit in memory; {less.micro} x {less.accumulation} is taken.")
        run.trainer.pace.plan = less


@contextmanager
def memory_explained(device: torch.device, what: str = "for the model", hint: str = LESS) -> Iterator[None]:
    """Turn any lack of memory inside (the device's, cuBLAS's, this machine's) into an `OutOfMemory` that says what it
    was for and what to do.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not memory_is_short(error):
            raise
        raise OutOfMemory(f"{distributed.device_name(device)} has too little memory {what}.", hint) from error


@contextmanager
def undone(trainer: optimizer.Trainer) -> Iterator[None]:
    """Undo what is tried inside with the model: restore buffers, drop gradients."""
    buffers = [(buffer, buffer.clone()) for buffer in trainer.scored.buffers()]
    try:
        yield
    finally:
        trainer.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _fits(run: Run) -> bool:
    """Return whether the micro batches of a step fit in memory beside the optimizer's state. Changes nothing."""
    trainer, held, optim, schedule = run.trainer, [], run.train.optim, run.train.schedule
    model, moments = trainer.scored, 2  # numbers that the optimizer keeps for every weight
    if optim.name == "sgd":
        cycled = schedule.name == "one-cycle" and schedule.momentum is not None
        moments = int(optim.momentum > 0 or cycled)
    try:
        with memory_explained(run.device), undone(trainer):
            if trainer.rehearsal:
                model = trainer.rehearsal()
                moments -= 1  # this copy's weights already take as much
            held += [torch.empty_like(parameter) for parameter in trainer.parameters for _ in range(moments)]
            batch = first_batch(run, longest=True)
            # the second one runs with the first one's gradients in memory
            for _ in range(min(2, trainer.plan.accumulation)):
                model(batch).loss_sum.backward()
        return True
    except OutOfMemory:
        return False
    finally:
        del held, model
        gc.collect()
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
