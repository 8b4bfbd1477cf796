"""Time the rows of `leansurgeon bench`: a model, its shape before surgery, single attention backends, and a sweep over
heads, compared in interleaved rounds. Imports torch inside functions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
        for stages in (same_head_dim, same_width):
            try:
                new = stages(shape, heads)
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


def key_value(stage: Stage, heads: int) -> int:
    """Return the number of key/value heads for this number of heads: equal in plain attention, unchanged in grouped
    attention. Raises `UsageError` if they cannot be shared evenly.
    """
    if stage.kv_heads == stage.heads:
        return heads
    if heads % stage.kv_heads:
        raise UsageError(f"{heads} heads cannot share {stage.kv_heads} key/value heads evenly, so they are left out.")
    return stage.kv_heads


def same_head_dim(shape: Shape, heads: int) -> Shape:
    """Return the same model with `heads` heads of the old size in every layer."""
    return Shape(tuple(replace(s, heads=heads, kv_heads=key_value(s, heads)) for s in shape.stages))


def same_width(shape: Shape, heads: int) -> Shape:
    """Return the same model with `heads` heads at the old inner width: head_dim is inner // heads."""
    for stage in shape.stages:
        if stage.inner % heads:
            raise UsageError(f"An inner width of {stage.inner} does not divide into {heads} heads, so it is left out.")
    return Shape(
        tuple(replace(s, heads=heads, kv_heads=key_value(s, heads), head_dim=s.inner // heads) for s in shape.stages)
    )


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
        bench = first.with_backend(backend)
        if problem := speed.runs(bench):
            skipped.append(f"{backend}: {problem}.")
            continue
        taking_part.append((replace(models[0], backend=backend), bench))
    for contender in models[1:]:
        bench = speed.TimedModel(contender.config, contender.architecture, load, "auto", device)
        speed.runs(bench)
        taking_part.append((contender, bench))
    benches = [bench for _, bench in taking_part]
    times = speed.time_benches(benches, rounds)
    units = load.batch * (load.tokens if "input_ids" in first.large else 1)
    rows = []
    for (contender, bench), timings in zip(taking_part, times, strict=True):
        ratios = [a / b for a, b in zip(timings["step"].seconds, times[0]["step"].seconds, strict=True)]
        parameters = sum(p.numel() for p in bench.model.parameters())
        rows.append(BenchRow(contender, parameters, timings, 0, units, speed.Timing.of(ratios)))
    # Memory last and one by one: a peak is measured with one model alone on the device.
    peaks = speed.peaks(benches, say)
    return [replace(row, peak=peak) for row, peak in zip(rows, peaks, strict=True)], skipped


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
