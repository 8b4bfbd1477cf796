"""Measure speed on this machine: seconds of a training step and of a forward pass, and the peak memory of the step.

Several models or attention backends are timed in interleaved rounds, so that other load slows all of them alike;
results are medians with the middle half of the rounds. Imports torch.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from leansurgeon.architectures.base import Architecture, Config
from leansurgeon.checkpoints.model import initialise
from leansurgeon.errors import OutOfMemory, memory_is_short
from leansurgeon.measure.costs.memory import Setting, choose_attention, make_optimizer, step
from leansurgeon.measure.costs.precision import autocast
from leansurgeon.measure.data import inputs
from leansurgeon.progress import Say, quiet_transformers, silent, track
from leansurgeon.reading.jsonfile import JsonObject

BACKENDS = ("auto", "math", "flash", "efficient", "cudnn", "eager")
WARM_UP = 2


@dataclass(frozen=True)
class Timing:
    """Seconds: the median of the rounds and the quartiles around it."""

    median: float
    low: float
    high: float
    seconds: tuple[float, ...]  # round by round

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        """Summarize rounds by median and quartiles."""
        several = len(seconds) > 1
        low, high = quantiles(seconds, n=4, method="inclusive")[::2] if several else (seconds[0], seconds[0])
        return cls(median(seconds), low, high, tuple(seconds))

    def as_dict(self) -> JsonObject:
        """Return seconds, and the number of rounds."""
        return {"median": self.median, "low": self.low, "high": self.high, "rounds": len(self.seconds)}


@dataclass(eq=False)
class TimedModel:
    """One model with one attention backend on one device, ready to be timed."""

    config: Config
    architecture: Architecture
    load: Setting  # only batch, tokens and precision are used
    backend: str
    device: torch.device

    def __post_init__(self) -> None:
        self.model = random_model(self.config, self.architecture).to(self.device)
        choose_attention(self.model, "eager" if self.backend == "eager" else "sdpa")
        self.optimizer = make_optimizer([p for p in self.model.parameters() if p.requires_grad], "adamw")
        self.large, self.single = (
            inputs.make(self.config, self.architecture, rows, self.load.tokens, self.device)
            for rows in (self.load.batch, 1)
        )

    def step(self) -> None:
        """Run forward, backward, clipping and update on one micro batch."""
        self.model.train()
        with kernel(self.backend), autocast(self.load.precision, self.device.type):
            loss = inputs.loss(inputs.run(self.model, self.large))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def forward(self, batch: dict[str, torch.Tensor]) -> None:
        """Run one forward pass in eval mode, without gradients."""
        self.model.eval()
        with torch.inference_mode(), kernel(self.backend), self.load.autocast(self.device.type):
            inputs.run(self.model, batch)

    def to(self, device: str | torch.device) -> None:
        """Move model, optimizer and inputs, so that peaks can be measured with one model on the device."""
        self.model.to(device)
        self.large, self.single = ({k: v.to(device) for k, v in x.items()} for x in (self.large, self.single))
        for state in self.optimizer.state.values():
            state.update({k: v.to(device) for k, v in state.items() if isinstance(v, torch.Tensor)})


def peaks(benches: list[TimedModel], say: Say = silent) -> list[int]:
    """Return the peak bytes of a training step of each: from the allocator on CUDA, with one model at a time on the
    device; elsewhere by counting live tensors.
    """
    if benches[0].device.type == "cuda":
        for bench in benches:
            bench.to("cpu")
    sizes = []
    for bench in benches:
        say(f"memory of {bench.backend}")
        if bench.device.type != "cuda":
            with kernel(bench.backend):
                batch = bench.large.items()
                count = step(bench.model, bench.load, lambda given=batch: {k: v.clone() for k, v in given}, cuda=False)
                sizes.append(count.peak)
            continue
        bench.to(bench.device)
        torch.cuda.empty_cache()
        bench.step()
        torch.cuda.synchronize(bench.device)
        torch.cuda.reset_peak_memory_stats(bench.device)
        bench.step()
        sizes.append(torch.cuda.max_memory_allocated(bench.device))
        bench.to("cpu")
    return sizes


def random_model(config: Config, architecture: Architecture) -> nn.Module:
    """Return the library's model with random weights, which do not affect speed."""
    with quiet_transformers():
        model = initialise(config, architecture, seed=0)
    if hasattr(model, "config"):
        model.config.use_cache = False
    return model.float()


def kernel(backend: str) -> Any:
    """Force one backend of torch's fused attention; "auto" and "eager" leave the choice to torch."""
    forced = {
        "math": SDPBackend.MATH,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
    }
    return sdpa_kernel(forced[backend]) if backend in forced else nullcontext()


def runs(bench: TimedModel) -> str | None:
    """Return why a forced backend cannot run this model here; None if it can. torch raises if it has no such kernel;
    cuDNN may also raise later, in its own words.

    Raises `OutOfMemory` if the device is too small, and torch's own errors if the backend was not forced.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch lists its reasons as warnings
            bench.step()
            bench.forward(bench.single)
    except RuntimeError as error:
        if memory_is_short(error) or isinstance(error, torch.OutOfMemoryError):
            raise OutOfMemory(
                f"{bench.load.batch} samples need more memory than there is.", "Give a smaller --batch."
            ) from None
        if bench.backend in ("auto", "eager"):
            raise
        bench.optimizer.zero_grad(set_to_none=True)  # backward may have stopped half way
        if any(words in str(error) for words in ("No available kernel", "No viable backend")):
            return "torch has no such kernel for this model, precision and device"
        return f"it failed ({(str(error) or type(error).__name__).splitlines()[0][:160]})"
    return None


def time_in_turns(
    works: list[dict[str, Callable[[], None]]], device: torch.device, rounds: int, seconds: float | None = None
) -> list[dict[str, Timing]]:
    """Return seconds of every work by name, from interleaved rounds after a warm-up. Stops after two rounds once
    `seconds` are over.
    """
    began, taken = time.perf_counter(), [{name: [] for name in work} for work in works]
    for number in track(range(-WARM_UP, rounds), "rounds", "rounds/s"):
        if seconds is not None and number >= 2 and time.perf_counter() - began > seconds:
            break
        order = list(zip(works, taken, strict=True))
        for work, kept in order if number % 2 else reversed(order):
            for name, one in work.items():
                spent = time_work(one, device)
                if number >= 0:
                    kept[name].append(spent)
    return [{name: Timing.of(values) for name, values in kept.items()} for kept in taken]


def time_work(work: Callable[[], None], device: torch.device) -> float:
    """Return wall-clock seconds of `work`, including the device's queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
