"""Monitoring of a training: losses, peak memory, the progress line on stderr, and trackers besides `metrics.jsonl`
(tensorboard or wandb, through Accelerate, where installed).

Reading a loss makes the host wait for the device, so losses are read in windows. Memory is that of training alone: the
allocator's peak on CUDA, the process's peak resident set on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from leansurgeon.errors import UsageError
from leansurgeon.progress import Screen, duration_text, rate_text
from leansurgeon.reading.jsonfile import by_dotted_key
from leansurgeon.training.recipe.schema import TrainingRecipe


@dataclass
class Window:
    """Losses of the steps since the last log point, on the device, and their time."""

    rows: list[torch.Tensor] = field(default_factory=list)
    _began: float = 0.0
    _waited: float = 0.0
    _taken: int = 0

    def begin(self) -> None:
        """Start the clock. Rows restored from a checkpoint stay, but do not count as steps of this process."""
        self._began, self._waited, self._taken = time.perf_counter(), 0.0, 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for data."""
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    @contextmanager
    def leave_out(self) -> Iterator[None]:
        """Exclude the time inside from step times. The clock is not reset: this may come between two log points."""
        start = time.perf_counter()
        yield
        self._began += time.perf_counter() - start

    def add(self, row: torch.Tensor) -> None:
        """Add a step: loss sum, count and gradient norm, `(3,)`, still on the device."""
        self.rows.append(row)
        self._taken += 1

    def values(self) -> list[list[float]]:
        """Return the rows as numbers without clearing them, for a checkpoint."""
        return torch.stack(self.rows).tolist() if self.rows else []

    def look(self) -> tuple[list[list[float]], int, float, float]:
        """Read all rows (the one place where the host waits for the device) and start a new window.

        Returns loss sum, count and gradient norm of each step; how many of them ran on this process (others came with a
        checkpoint); their seconds; and how many of these were spent waiting for data.
        """
        rows, now = self.values(), time.perf_counter()
        look = rows, self._taken, now - self._began, self._waited
        self.rows, self._began, self._waited, self._taken = [], now, 0.0, 0
        return look


class PeakMemory:
    """Peak memory; `bytes` is the largest peak over all stretches between `resume` and `read`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes = 0
        self.kind = "cuda allocator peak" if device.type == "cuda" else "process peak RSS"

    def resume(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with suppress(OSError):  # no such file in some containers
                Path("/proc/self/clear_refs").write_text("5")  # resets the kernel's peak (proc(5))

    @contextmanager
    def leave_out(self) -> Iterator[None]:
        """Exclude what runs inside from the peak."""
        self.read()
        yield
        self.resume()

    def read(self) -> int:
        """Return the peak so far, at the end of a stretch or in the middle."""
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
        else:
            status = Path("/proc/self/status").read_text()
            peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
        self.bytes = max(self.bytes, peak)
        return self.bytes


class Progress(Screen):
    """The progress line of a training of `steps` steps (None for a timed training)."""

    steps: int | None = 0

    def step(
        self,
        done: int,
        *,
        loss: float,
        lr: float,
        rate: float,
        unit: str,
        eta: float,
        waiting: float,
        memory: int,
        fraction: float,
    ) -> None:
        """Show the state after `done` steps.

        `rate` is in `unit`, `eta` in seconds, `waiting` (for data) a share, `memory` in bytes. `fraction` of the
        training is shown if `steps` is None.
        """
        if self.quiet:
            return
        where = f"{done}/{self.steps}" if self.steps is not None else f"{done} ({100 * fraction:.1f} %)"
        parts = [f"step {where}", f"loss {loss:.4f}", f"lr {lr:.2e}", rate_text(rate, unit)]
        parts += [f"data {100 * waiting:.0f} %", f"{memory / 1e9:.2f} GB", f"eta {duration_text(eta)}"]
        self.show("  ".join(parts), fraction, always=done == self.steps)


_PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",)}


def check_trackers(names: tuple[str, ...]) -> None:
    """Raise `UsageError` for a tracker that is not installed."""
    for name in names:
        if not any(find_spec(package) for package in _PACKAGES[name]):
            raise UsageError(
                f"The recipe asks for the tracker {name}, which is not installed.",
                f"`pip install {name}`, or leave it out of train.trackers; metrics.jsonl is always written.",
            )


class Trackers:
    """The trackers of one run; does nothing without any. Only rank 0 opens them."""

    def __init__(self, recipe: TrainingRecipe, run_dir: Path, *, main: bool) -> None:
        self._trackers: list[Any] = []
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        # Lists become text, which every tracker takes.
        settings = by_dotted_key(recipe.model_dump(mode="json", exclude_none=True))
        plain = {key: v if isinstance(v, (int, float, str, bool)) else str(v) for key, v in settings.items()}
        for name in recipe.train.trackers if main else ():
            kind = LOGGER_TYPE_TO_CLASS[name]
            folder = {"logging_dir": str(run_dir / "trackers")} if kind.requires_logging_directory else {}
            tracker = kind(recipe.name, **folder)
            if hasattr(tracker, "start"):  # newer versions of Accelerate open a tracker in two steps
                tracker.start()
            tracker.store_init_configuration(plain)
            self._trackers.append(tracker)

    def log(self, values: dict[str, float | None], step: int) -> None:
        numbers = {key: value for key, value in values.items() if isinstance(value, (int, float))}
        for tracker in self._trackers:
            tracker.log(numbers, step=step)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.finish()
