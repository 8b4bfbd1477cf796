"""What the paper prints, and how to read it: the types of `tables.yaml` and `figures.yaml`. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

from leansurgeon.reading import yamlfile

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
