"""What the paper prints, and how to read it: the types of `tables.yaml` and `figures.yaml`. And the recount of every
row's parameters, by the declaration of its family (no torch).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from leansurgeon.architectures import load_families
from leansurgeon.architectures.presets import get
from leansurgeon.checkpoints.reshaped import Reshaped
from leansurgeon.checkpoints.source import Source
from leansurgeon.reading import yamlfile
from leansurgeon.shape import Shape
from leansurgeon.surgery.requested_shape import RequestedShape, Target, per_stage, resolve

UNITS = {"M": 1_000_000, "k": 1_000}


@dataclass(frozen=True)
class ShapeWords:
    """Depth, heads and MLP width as `leansurgeon shrink` takes them: `12`, or one number per stage `8,8,16,4`.

    None keeps the preset's own.
    """

    layers: str | None = None
    heads: str | None = None
    mlp_dim: str | None = None


@dataclass(frozen=True)
class Row:
    """One model of one exhibit, as the paper prints it: its shape (`printed`), and its parameters as text (`figure`,
    such as `86.6 M`), since their precision matters. `scores` are in the paper's order; the exhibit names the headline.
    `memory` is in GB over all GPUs; `change` is the percentage printed next to the parameters.

    `reading` is the shape that reproduces the printed parameters if the printed shape does not. `others` are further
    shapes that the remark mentions. `remark` may use the numbers that the audit counts: {ours}, {as_printed}, {missing}
    (printed minus counted), {change} (percent against the original) and {other[NAME]}.
    """

    model: str
    role: str  # original | lean | variant
    preset: str
    printed: ShapeWords
    policy: str  # keep | split: how the paper gets its head_dim from the number of heads
    figure: str | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    memory: float | None = None
    change: str | None = None
    reading: ShapeWords | None = None
    others: Mapping[str, ShapeWords] = field(default_factory=dict)
    remark: str = ""

    @property
    def words(self) -> ShapeWords:
        """The shape that is counted."""
        return self.reading or self.printed

    @property
    def count(self) -> int | None:
        """The printed figure as a number of parameters."""
        if self.figure is None:
            return None
        number, unit = self.figure.split()
        return int(Decimal(number) * UNITS[unit])


@dataclass(frozen=True)
class Exhibit:
    """A table or figure. `headline` names the score that is shown; `remarks` apply to the whole exhibit."""

    key: str  # "4", "fig3"
    title: str
    rows: tuple[Row, ...]
    headline: str
    remarks: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """`Table 4` or `Figure 3`."""
        return f"Figure {self.key[3:]}" if self.key.startswith("fig") else f"Table {self.key}"

    def original(self, row: Row) -> Row:
        """Return the row that `row` is compared with."""
        return next(r for r in self.rows if r.role == "original" and r.model == row.model)


def agreement(count: int, text: str | None) -> str:
    """Return how a count fits a printed figure: `rounds`, `truncates` (cut, not rounded), `differs`, or `unprinted`.

    >>> agreement(86_567_656, "86.6 M"), agreement(119_589_889, "119 M"), agreement(62_653_416, "62.0 M")
    ('rounds', 'truncates', 'differs')
    """
    if text is None:
        return "unprinted"
    number, unit = text.split()
    printed, value = Decimal(number), Decimal(count) / UNITS[unit]
    if value.quantize(printed, ROUND_HALF_UP) == printed:
        return "rounds"
    return "truncates" if value.quantize(printed, ROUND_DOWN) == printed else "differs"


def read(name: str) -> tuple[Exhibit, ...]:
    """Read the exhibits of `tables.yaml` or `figures.yaml`, in the order of the file."""
    document, _ = yamlfile.read(Path(__file__).with_name(name))
    return tuple(
        Exhibit(e["key"], e["title"], tuple(_rows(e)), e["headline"], tuple(e.get("remarks", ()))) for e in document
    )


def _rows(exhibit: dict[str, Any]) -> Iterator[Row]:
    for model in exhibit["models"]:
        for row in model["rows"]:
            scores = dict(zip(exhibit["scores"], row["scores"], strict=True)) if "scores" in row else {}
            yield Row(
                model["model"],
                row["role"],
                model["preset"],
                _words(row["shape"]),
                model["policy"],
                row.get("parameters"),
                scores,
                row.get("memory"),
                row.get("change"),
                reading=_words(row["reading"]) if "reading" in row else None,
                others={name: _words(other) for name, other in row.get("others", {}).items()},
                remark=row.get("remark", ""),
            )


def _words(shape: list[int | str]) -> ShapeWords:
    return ShapeWords(*map(str, shape))


# -- the audit ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AuditedRow:
    """One row next to our count of it."""

    row: Row
    shape: Shape
    parameters: int
    original: int  # our count of the row that it is compared with
    saved_by: Mapping[str, int]  # depth, heads, mlp, in this order
    as_printed: int | None  # our count of the printed shape, if another shape is counted
    others: Mapping[str, int] = field(default_factory=dict)

    @property
    def agreement(self) -> str:
        """Whether our count rounds to the printed one."""
        return agreement(self.parameters, self.row.figure)

    @property
    def difference(self) -> int | None:
        """Our count minus the printed figure."""
        return None if self.row.count is None else self.parameters - self.row.count

    @property
    def difference_percent(self) -> float | None:
        """Difference from the printed count in percent; None if none is printed."""
        return None if self.row.count is None else 100 * (self.parameters / self.row.count - 1)

    @property
    def change_percent(self) -> float:
        """Change from the original in percent, by our counts."""
        return 100 * (self.parameters / self.original - 1)

    @property
    def remark(self) -> str:
        """The row's remark with the numbers filled in."""
        return self.row.remark.format(
            ours=f"{self.parameters:,}",
            as_printed=f"{self.as_printed or self.parameters:,}",
            missing=f"{-(self.difference or 0):,}",
            change=f"{self.change_percent:+.2f} %",
            other={name: f"{value:,}" for name, value in self.others.items()},
        )


def audit(exhibit: Exhibit) -> list[AuditedRow]:
    """Count every row of an exhibit."""
    return [audit_row(row, exhibit.original(row)) for row in exhibit.rows]


def audit_row(row: Row, original: Row) -> AuditedRow:
    """Count one row under the paper's head policy."""
    start = OriginalModel(row.preset)
    target = target_of(start, row.words, row.policy)
    # What is saved by dropping layers, then by changing their heads, then their MLP.
    stages = list(zip(source_of(start).shape.stages, target.shape.stages, strict=True))
    shapes = [
        Shape(tuple(now for now, _ in stages)),
        Shape(tuple(replace(now, depth=new.depth) for now, new in stages)),
        Shape(tuple(replace(new, mlp_dim=now.mlp_dim) for now, new in stages)),
        target.shape,
    ]
    counts = [count_declared(start, target.architecture.name, shape) for shape in shapes]
    # The printed MLP width applies to every part of the model, as if it had been built so (VOLO's class attention has
    # an MLP that surgery would leave alone).
    wider = OriginalModel(row.preset, row.printed.mlp_dim)
    return AuditedRow(
        row=row,
        shape=target.shape,
        parameters=count(start, target),
        original=count(start, target_of(start, original.words, original.policy)),
        saved_by={part: a - b for part, a, b in zip(("depth", "heads", "mlp"), counts, counts[1:], strict=False)},
        as_printed=count(wider, target_of(wider, row.printed, row.policy)) if row.reading else None,
        others={name: count(start, target_of(start, words, row.policy)) for name, words in row.others.items()},
    )


# -- shapes ---------------------------------------------------------------------------------------


class OriginalModel(NamedTuple):
    """The original of a row: a preset, possibly with another MLP width in its config."""

    preset: str
    mlp_dim: str | None = None


@cache
def source_of(start: OriginalModel) -> Source:
    """Return the source without its list of tensors, which is not needed here."""
    preset = get(start.preset)
    family, config = load_families()[preset.family], preset.config
    if start.mlp_dim is not None:
        stages = family.shape(config).stages
        widths = per_stage(start.mlp_dim, [s.mlp_dim for s in stages], "MLP")
        wider = Shape(tuple(replace(s, mlp_dim=m) for s, m in zip(stages, widths, strict=True)))
        config = family.with_shape(config, wider)
    return Source(preset.name, "preset", config, family, (), preset=preset)


@cache
def target_of(start: OriginalModel, words: ShapeWords, policy: str) -> Target:
    """Resolve the words to a shape and the family that holds it, as `shrink` does. Raises `UsageError`."""
    source = source_of(start)
    target = resolve(source, RequestedShape(words.heads, words.layers, policy, words.mlp_dim, init="fresh"))
    Reshaped(source, target.architecture, target.shape).config()  # rejects what cannot be stored
    return target


# -- counts ---------------------------------------------------------------------------------------


def count(start: OriginalModel, target: Target) -> int:
    """Count the parameters of the shape and family of a target."""
    return count_declared(start, target.architecture.name, target.shape)


@cache
def count_declared(start: OriginalModel, family: str, shape: Shape) -> int:
    """Count parameters by the declaration. Layers of a stage are alike, except perhaps for the first: so two are
    declared, and the second is counted for all that follow. (Declaring all of them takes longer than everything else
    here.)
    """
    architecture, short = load_families()[family], Shape(tuple(replace(s, depth=min(2, s.depth)) for s in shape.stages))
    total = 0
    for spec in architecture.tensors(Reshaped(source_of(start), architecture, short).converted, short):
        second = spec.layer is not None and spec.index == 1
        total += spec.counted * spec.size * (shape.stages[spec.stage].depth - 1 if second else 1)
    return total
