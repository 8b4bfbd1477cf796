"""Derive steps, batches, warm-up and learning rate from a recipe and the number of processes, and track the position in
the schedule: the step or, in a timed training, the time. Numbers only, no torch.

Learning rate and momentum are pure functions of the step: nothing to save, the same on any number of processes. A timed
training would have to read the clock at every step and agree on it with the other processes. Instead rank 0 reads it
now and then, and between two readings the time is extrapolated: what happens at a step is a function of the step and of
the last reading, the same on every process.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from leansurgeon.errors import UsageError
from leansurgeon.training.recipe.durations import Duration, parse_duration
from leansurgeon.training.recipe.schema import Train

ENDLESS = 2**62  # steps of a timed training
TICKS = 1_000_000.0  # the schedule of a timed training is divided into this many ticks
_SHORTER = "Shorten it, or give it as a share: --set train.{}=0.1."


@dataclass(frozen=True)
class Plan:
    """`batch = micro * accumulation * processes` samples go into each of `steps` optimizer steps.

    With a batch ramp, the batch of a step is `batch_at`, and `batch` is the last one. Samples are taken in groups of
    `group` from one epoch after another; an epoch has `epoch_samples`, without its incomplete last group.
    """

    steps: int
    steps_per_epoch: int
    batch: int
    micro: int
    accumulation: int
    processes: int
    warmup: float
    train: Train
    group: int
    epoch_samples: int
    ramp_steps: int = 0
    seconds: float | None = None  # length of a timed training
    expected: int | None = None  # steps that a timed training is expected to take

    @property
    def timed(self) -> bool:
        return self.seconds is not None

    @property
    def epochs(self) -> float:
        return self.position(self.steps) / self.epoch_samples

    def batch_at(self, step: int) -> int:
        """Return the samples in optimizer step `step`, over all processes."""
        return int(self._ramp[step]) if step < self.ramp_steps else self.batch

    def position(self, step: int) -> int:
        """Return the samples that were seen before optimizer step `step`, over all epochs."""
        if step < self.ramp_steps:
            return int(self._ramp_position[step])
        return int(self._ramp_position[-1]) + (step - self.ramp_steps) * self.batch

    @cached_property
    def _ramp(self) -> np.ndarray:
        return ramp(self.group, self.batch, self.ramp_steps)

    @cached_property
    def _ramp_position(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self._ramp)])

    @property
    def peak(self) -> float:
        """Return the highest learning rate: the recipe's, or less in a training too short for it."""
        optim, steps = self.train.optim, self.expected if self.timed else self.steps
        if optim.full_steps is None or not steps:
            return optim.lr
        return max(self.train.schedule.min_lr, optim.lr * min(1.0, (steps / optim.full_steps) ** 0.5))

    def lr(self, place: float) -> float:
        """Return the learning rate at a place of the schedule: an optimizer step (from 0), or a tick in a timed
        training.

        `cosine` (Loshchilov and Hutter, 2017, without restarts), `linear` and `constant` rise linearly from `warmup_lr`
        to the peak over the warm-up; the first two then fall towards `min_lr`, which they would reach at the end. They
        count as `transformers.get_scheduler` does. `one-cycle` counts as `torch.optim.lr_scheduler.OneCycleLR` does,
        with the warm-up in place of pct_start * total. `triangle` has no warm-up.
        """
        shape, peak, warmup = self.train.schedule, self.peak, self.warmup
        if shape.name == "one-cycle":
            low = peak / shape.div
            return self._cycle(place, low, peak, low / shape.final_div)
        if shape.name == "triangle":
            done = place / self._end
            rising = shape.base + done * (1 - shape.base) / (1 - shape.fall)
            return peak * max(0.0, min(rising, (1 - done) / shape.fall))
        if place < warmup:
            return shape.warmup_lr + (peak - shape.warmup_lr) * place / warmup
        if shape.name == "constant":
            return peak
        done = min(1.0, (place - warmup) / max(1, self._end - warmup))
        left = 0.5 * (1.0 + math.cos(math.pi * done)) if shape.name == "cosine" else 1.0 - done
        return shape.min_lr + (peak - shape.min_lr) * left

    def momentum(self, place: float) -> float | None:
        """Return beta1 (or SGD's momentum) if a one-cycle schedule cycles it; None if it stays constant."""
        shape = self.train.schedule
        if shape.name != "one-cycle" or shape.momentum is None:
            return None
        least, most = shape.momentum
        return self._cycle(place, most, least, most)

    def _cycle(self, place: float, first: float, middle: float, last: float) -> float:
        """Interpolate from `first` to `middle` at the last step of the warm-up, then to `last` at that of
        the training.
        """
        top, end = self.warmup - 1, self._end - 1
        if place <= top and top > 0:
            a, b, done = first, middle, place / top
        else:
            a, b, done = middle, last, min(1.0, (place - top) / max(1e-9, end - top))
        if self.train.schedule.anneal == "cosine":
            return b + (a - b) / 2 * (1 + math.cos(math.pi * done))
        return a + (b - a) * done

    @property
    def _end(self) -> float:
        """The place at which the schedule ends."""
        return TICKS if self.timed else self.steps

    def evaluate_after(self, done: int) -> bool:
        """Return whether an evaluation follows when `done` steps are finished. Does not cover intervals in time."""
        return done == self.steps or self.due(self.train.eval.every, done)

    def due(self, every: str, done: int) -> bool:
        """Return whether something with the interval `every`, in epochs or steps, is due after step `done`; never for a
        time.
        """
        return self._times_by(every, done) > self._times_by(every, done - 1)

    def times(self, every: str) -> int:
        """Return how often something with the interval `every` is due before the last step."""
        return self._times_by(every, self.steps - 1)

    def evaluations_left(self, done: int) -> int:
        """Return how many evaluations come after step `done`, the one at the end included; intervals in time do not
        count.
        """
        every = self.train.eval.every
        return self.times(every) - min(self._times_by(every, done), self.times(every)) + (done < self.steps)

    def _times_by(self, every: str, done: int) -> int:
        length = parse_duration(every)
        if length.seconds:
            return 0
        if length.unit == "ep" and self.ramp_steps:
            return int(self.position(done) // (length.value * self.epoch_samples))
        return done // length.steps(self.steps_per_epoch)


def ramp(start: int, batch: int, steps: int) -> np.ndarray:
    """Return the batches of the first `steps` steps, `(steps,)`: linear from `start` to `batch`, in multiples of
    `start`.
    """
    multiples = batch // start
    return start * (1 + (np.arange(steps) * (multiples - 1)) // max(1, steps))


def make_plan(
    train: Train, train_samples: int, processes: int, *, micro_limit: int | None = None, cut_short: bool = False
) -> Plan:
    """Return the plan of `train` on a training set of `train_samples`. An epoch drops its last, incomplete batch.

    `micro_limit` lowers the micro batch further, if memory requires it. `cut_short` says that the data was limited for
    a quick look: the warm-up may then be longer than the training. Raises `UsageError` with both numbers if the batches
    do not fit together, or a warm-up or batch ramp is longer than the training.
    """
    if train_samples < train.batch:
        raise UsageError(
            f"The training set has {train_samples} samples, fewer than one batch of {train.batch}.",
            "Choose a smaller train.batch.",
        )
    group = train.batch_ramp.start if train.batch_ramp else train.batch
    micro = _micro(train, group, processes, micro_limit)
    epoch_samples = train_samples // group * group
    per_epoch = train_samples // train.batch
    duration = parse_duration(train.duration)
    timed = duration.seconds is not None
    steps, ramp_steps = _steps(train, duration, epoch_samples)
    if not cut_short:
        _check_lengths(train, duration, steps, per_epoch, epoch_samples)
    warmup = train.schedule.warmup
    if timed:
        share = warmup if isinstance(warmup, float) else parse_duration(warmup).seconds / duration.seconds
        warm = TICKS * min(1.0, share)
    elif isinstance(warmup, float):
        # torch's one-cycle takes the fraction as it is; the others count whole steps.
        warm = steps * warmup if train.schedule.name == "one-cycle" else int(steps * warmup)
    else:
        warm = min(steps, parse_duration(warmup).steps(per_epoch))
    return Plan(
        steps=steps,
        steps_per_epoch=per_epoch,
        batch=train.batch,
        micro=micro,
        accumulation=train.batch // processes // micro,
        processes=processes,
        warmup=warm,
        train=train,
        group=group,
        epoch_samples=epoch_samples,
        ramp_steps=ramp_steps,
        seconds=duration.seconds,
    )


def _check_lengths(train: Train, duration: Duration, steps: int, per_epoch: int, epoch_samples: int) -> None:
    """Raise `UsageError` if the warm-up or the batch ramp is longer than the training."""
    warmup = train.schedule.warmup
    warm = parse_duration(warmup) if isinstance(warmup, str) else None
    until = train.batch_ramp.until if train.batch_ramp else None
    timed = duration.seconds is not None
    if warm and timed and warm.seconds > duration.seconds:
        raise UsageError(
            f"The warm-up of {warmup} ({warm.seconds:g} s) is longer than the training of {train.duration} "
            f"({duration.seconds:g} s).",
            _SHORTER.format("schedule.warmup"),
        )
    if timed:
        return  # its number of steps is unknown
    if warm and warm.steps(per_epoch) > steps:
        raise UsageError(
            f"The warm-up of {warmup} has {warm.steps(per_epoch)} steps and the training of {train.duration} {steps}.",
            _SHORTER.format("schedule.warmup"),
        )
    if isinstance(until, str):
        ramped = _ramp_steps(train, epoch_samples)
        if ramped > steps:
            raise UsageError(
                f"The batch ramp until {until} has {ramped} steps and the training of {train.duration} {steps}.",
                _SHORTER.format("batch_ramp.until"),
            )


def _micro(train: Train, group: int, processes: int, limit: int | None) -> int:
    share, rest = divmod(group, processes)
    if rest or share == 0:
        raise UsageError(
            f"A batch of {group} cannot be shared evenly by {processes} processes.",
            f"Choose train.batch and train.batch_ramp.start as multiples of {processes}.",
        )
    micro = min(train.micro_batch or share, share)
    if share % micro:
        raise UsageError(
            f"micro_batch {micro} does not divide {share}, the samples of a batch on each of {processes} process(es).",
            f"Choose a train.micro_batch that divides {share}.",
        )
    if limit is not None and limit < micro:
        sizes = range(2, limit + 1, 2) if train.mixes else range(1, limit + 1)
        micro = max((size for size in sizes if share % size == 0), default=micro)
    if train.mixes and micro % 2:
        raise UsageError(
            f"Mixup mixes pairs of samples, so a micro batch of {micro} must be even.",
            "Choose train.batch and train.micro_batch such that each process gets an even number.",
        )
    return micro


def _steps(train: Train, duration: Duration, epoch_samples: int) -> tuple[int, int]:
    """Return the optimizer steps of the training, and how many of them the batch ramp takes."""
    timed = duration.seconds is not None
    if timed or not train.batch_ramp:
        steps = ENDLESS if timed else duration.steps(epoch_samples // train.batch)
        return steps, _ramp_steps(train, epoch_samples) if train.batch_ramp else 0
    until = train.batch_ramp.until

    def ramp_steps(steps: int) -> int:
        return int(steps * until) if isinstance(until, float) else min(steps, _ramp_steps(train, epoch_samples))

    def samples(steps: int) -> int:
        taken = ramp_steps(steps)
        return int(ramp(train.batch_ramp.start, train.batch, taken).sum()) + (steps - taken) * train.batch

    if duration.unit == "st":
        return duration.steps(1), ramp_steps(duration.steps(1))
    wanted = duration.value * epoch_samples
    most = max(2, round(wanted / train.batch_ramp.start))
    fewest = 1 + bisect_left(range(1, most), wanted, key=samples)  # steps needed to see that many samples
    return fewest, ramp_steps(fewest)


def _ramp_steps(train: Train, epoch_samples: int) -> int:
    """Return the steps of a ramp whose length has a unit."""
    until = parse_duration(train.batch_ramp.until)
    if until.unit != "ep":
        return until.steps(1)
    return max(1, round(until.value * epoch_samples / ((train.batch_ramp.start + train.batch) / 2)))


@dataclass
class Pace:
    """`seconds` were spent when `step` steps were done, and a step takes `per_step` seconds."""

    plan: Plan
    step: int = 0
    seconds: float = 0.0
    per_step: float = 0.0

    def look(self, step: int, seconds: float) -> None:
        """Store what rank 0 read: `seconds` of training, evaluations included, after `step` steps."""
        if step > self.step:
            self.per_step = max(0.0, seconds - self.seconds) / (step - self.step)
        self.step, self.seconds = step, seconds

    def place(self, step: int) -> float:
        """Return the argument of `Plan.lr` for optimizer step `step`."""
        return TICKS * self.fraction(step) if self.plan.timed else float(step)

    def fraction(self, step: int) -> float:
        """Return how much of the training is over before step `step`, from 0 to 1."""
        if not self.plan.timed:
            return min(1.0, step / self.plan.steps)
        return min(1.0, (self.seconds + (step - self.step) * self.per_step) / self.plan.seconds)

    def over(self, done: int) -> bool:
        """Return whether the training ends after `done` steps; a timed one does at least one step."""
        return done > 0 and self.fraction(done) >= 1.0

    def state(self) -> dict[str, float]:
        return {"step": self.step, "seconds": self.seconds, "per_step": self.per_step}

    def restore(self, state: dict[str, float]) -> None:
        self.step, self.seconds, self.per_step = int(state["step"]), state["seconds"], state["per_step"]
