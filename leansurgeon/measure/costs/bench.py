"""Time the rows of `leansurgeon bench`: a model, its shape before surgery, single attention backends, and a sweep over
heads, compared in interleaved rounds. Imports torch inside functions.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from leansurgeon import architectures
from leansurgeon.architectures.base import Architecture, Config
from leansurgeon.checkpoints.reshaped import Reshaped
from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import LeanSurgeonError, UsageError
from leansurgeon.progress import Say
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.shape import Shape

if TYPE_CHECKING:
    import torch

    from leansurgeon.measure.costs.memory import Setting
    from leansurgeon.measure.costs.speed import Timing
    from leansurgeon.shape import Stage


@dataclass(frozen=True)
class Contender:
    """A shape of the model to time; `backend` is one of `speed.BACKENDS`."""

    name: str
    config: Config
    architecture: Architecture
    shape: Shape
    backend: str = "auto"


@dataclass(frozen=True)
class BenchRow:
    """Measurements of one contender. `peak` is the bytes of a training step; `against_first` is the ratio of its step
    to that of the first row, round by round.
    """

    contender: Contender
    parameters: int
    times: dict[str, Timing]
    peak: int
    units: float  # images, or tokens of text, in a batch
    against_first: Timing

    @property
    def verdict(self) -> str:
        """faster, slower or same: the middle half of the rounds must agree."""
        return "faster" if self.against_first.high < 1 else "slower" if self.against_first.low > 1 else "same"

    def as_dict(self) -> JsonObject:
        """Return the row for JSON; times in seconds, memory in bytes."""
        c = self.contender
        ratio = self.against_first
        return {
            "name": c.name,
            "shape": c.shape.as_dict(),
            "backend": c.backend,
            "parameters": self.parameters,
            "seconds": {name: timing.as_dict() for name, timing in self.times.items()},
            "training_per_second": self.units / self.times["step"].median,
            "forward_per_second": self.units / self.times["forward"].median,
            "peak_memory": self.peak,
            "step_against_first": {
                "low": ratio.low,
                "median": ratio.median,
                "high": ratio.high,
                "verdict": self.verdict,
            },
        }


# -- contenders -----------------------------------------------------------------------------------


def contenders(source: Source, sweep: list[int]) -> tuple[list[Contender], list[str]]:
    """Return the model, its shape before surgery if surgery.json holds it, and two shapes for every number of heads in
    the sweep: with the model's head_dim, and with its inner width. Also return sentences on those that are impossible.
    """
    shape, skipped = source.shape, []
    models = [Contender(label(shape), source.config, source.architecture, shape)]
    before = source.record.plan.before if source.record else None
    wanted = [("before surgery", before)] if before not in (None, shape) else []
    for heads in sweep:
        for same_size in (True, False):
            try:
                new = Shape(tuple(with_heads(stage, heads, same_size) for stage in shape.stages))
                if new != shape and new not in [s for _, s in wanted]:
                    wanted.append((label(new), new))
            except UsageError as error:
                skipped.append(error.message)
    for name, new in wanted:
        try:
            family = source.architecture
            if not family.holds(shape, new):
                if family.decoupled is None:
                    raise UsageError(f"{label(new)}: {family.why_not_decoupled(new.stages[0])}")
                family = architectures.decoupled_form_of(family)
            config = Reshaped(source, family, new).config(list(range(min(new.depth, shape.depth))))
            models.append(Contender(name, config, family, new))
        except LeanSurgeonError as error:
            skipped.append(error.message)
    return models, skipped


def label(shape: Shape) -> str:
    """Describe a shape in a few words, for a row of the table."""
    return f"{shape.column('depth')} layers, {shape.column('heads')} x {shape.column('head_dim')}"


def with_heads(stage: Stage, heads: int, same_size: bool) -> Stage:
    """Return the layers with `heads` heads of the old size, or at the old inner width. Plain attention gets as many
    key/value heads, grouped attention keeps its own. Raises `UsageError` for heads that do not divide evenly.
    """
    if not same_size and stage.inner % heads:
        raise UsageError(f"An inner width of {stage.inner} does not divide into {heads} heads, so it is left out.")
    shared = heads if stage.kv_heads == stage.heads else stage.kv_heads
    if heads % shared:
        raise UsageError(f"{heads} heads cannot share {shared} key/value heads evenly, so they are left out.")
    size = stage.head_dim if same_size else stage.inner // heads
    return replace(stage, heads=heads, kv_heads=shared, head_dim=size)


def parse_sweep(text: str | None) -> list[int]:
    """Parse `8,12,24` into numbers. Raises `UsageError`."""
    words = [word.strip() for word in text.split(",")] if text else []
    if not all(word.isascii() and word.isdecimal() and int(word) > 0 for word in words):
        raise UsageError(f"--sweep-heads {text}: give numbers of heads, such as 8,12,24.")
    return [int(word) for word in dict.fromkeys(words)]


# -- measuring ------------------------------------------------------------------------------------


def time_contenders(
    models: list[Contender], load: Setting, backends: list[str], rounds: int, device: torch.device, say: Say
) -> tuple[list[BenchRow], list[str]]:
    """Time every contender, and the first one also with every backend of `backends` besides "auto".

    Returns the rows, and sentences on backends that do not run here. Raises `OutOfMemory`.
    """
    from leansurgeon.measure.costs import speed

    first = speed.TimedModel(models[0].config, models[0].architecture, load, "auto", device)
    speed.runs(first)
    taking_part, skipped = [(models[0], first)], []
    for backend in backends:
        say(f"trying {backend}")
        if backend == "eager":  # eager attention needs a model of its own
            bench = speed.TimedModel(first.config, first.architecture, load, backend, device)
        else:
            bench = copy.copy(first)
            bench.backend = backend
        if problem := speed.runs(bench):
            skipped.append(f"{backend}: {problem}.")
            continue
        taking_part.append((replace(models[0], backend=backend), bench))
    for contender in models[1:]:
        bench = speed.TimedModel(contender.config, contender.architecture, load, "auto", device)
        speed.runs(bench)
        taking_part.append((contender, bench))
    benches = [bench for _, bench in taking_part]
    if rounds < 1:
        raise UsageError(f"--rounds must be at least 1, and {rounds} was asked for.")
    times = speed.time_in_turns(
        [  # not kept: it would hold the batches on the device
            {"step": b.step, "forward_1": partial(b.forward, b.single), "forward": partial(b.forward, b.large)}
            for b in benches
        ],
        device,
        rounds,
    )
    units = load.batch * (load.tokens if "input_ids" in first.large else 1)
    # Memory last and one by one: a peak is measured with one model alone on the device.
    peaks, rows = speed.peaks(benches, say), []
    for (contender, bench), timings, peak in zip(taking_part, times, peaks, strict=True):
        ratios = [a / b for a, b in zip(timings["step"].seconds, times[0]["step"].seconds, strict=True)]
        parameters = sum(p.numel() for p in bench.model.parameters())
        rows.append(BenchRow(contender, parameters, timings, peak, units, speed.Timing.of(ratios)))
    return rows, skipped


# -- conclusions ---------------------------------------------------------------------------------


def remarks(rows: list[BenchRow]) -> list[str]:
    """Return sentences on what the numbers say about cuts."""
    said = []
    first = rows[0]
    for row in rows[1:]:
        ratio = row.against_first
        spread = f"{ratio.median:.2f} x, middle half {ratio.low:.2f} to {ratio.high:.2f}"
        if row.contender.name == "before surgery":
            # The first row is the cut: it is faster if the original takes longer.
            words = {"slower": "is faster than", "same": "is not shown to be faster than", "faster": "is slower than"}
            said.append(
                f"This cut {words[row.verdict]} the model before surgery here (whose step takes {spread} of the cut's)."
            )
        elif row.contender.backend == "auto" and row.verdict != "faster":
            less = row.parameters < first.parameters
            what = "will not be faster" if row.verdict == "slower" else "is not shown to be faster"
            said.append(
                f"{row.contender.name} {what} here (step {spread} of the first row's)"
                + (", with fewer parameters." if less else ".")
            )
    return said


def table(rows: list[BenchRow], images: bool) -> str:
    """Return a table of 80 columns; times are medians, with the quartiles of the step."""
    from tabulate import tabulate

    cells = []
    for row in rows:
        step = row.times["step"]
        c = row.contender
        cells.append(
            [
                f"{c.name}{'' if c.backend == 'auto' else ' ' + c.backend}"[:28],
                f"{1000 * step.median:.3g}",
                f"{1000 * step.low:.3g}-{1000 * step.high:.3g}",
                f"{1000 * row.times['forward_1'].median:.3g}",
                f"{1000 * row.times['forward'].median:.3g}",
                f"{row.units / step.median:,.0f}",
                f"{row.peak / 2**20:,.0f}",
            ]
        )
    head = ["shape and backend", "step\nms", "middle\nhalf", "fwd 1\nms", "fwd\nms"]
    head += ["images/s\ntraining" if images else "tokens/s\ntraining", "peak\nMiB"]
    return tabulate(cells, headers=head, colalign=("left", *["right"] * 6), disable_numparse=True)
