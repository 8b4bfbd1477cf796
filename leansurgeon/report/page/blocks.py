"""What a page is made of: tables, charts, sentences, code, facts, groups. The templates know how each looks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from leansurgeon.report.charts.forms import Chart
from leansurgeon.report.humans import NONE
from leansurgeon.report.tables.columns import Column, TableRow, without_gaps


@dataclass(frozen=True)
class Cell:
    """A figure as a person reads it, with the number itself beside it for programs, and a word behind it."""

    text: str
    value: float | None = None
    beside: str = ""


@dataclass(frozen=True)
class Table:
    """The first column names the row. Where a screen is narrow, `cards` makes each row a block of its own (labels
    before the figures); else the table scrolls inside its frame. `hidden` keeps the caption for screen readers.
    """

    kind: ClassVar[str] = "table"
    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    cards: bool = True
    hidden: bool = False


@dataclass(frozen=True)
class Figures:
    kind: ClassVar[str] = "figures"
    charts: tuple[Chart, ...]


@dataclass(frozen=True)
class Line:
    """A sentence in which `backticks` mark what is typed, behind a word that stands out."""

    text: str
    strong: str = ""


@dataclass(frozen=True)
class Words:
    """Sentences as a list. `look` is "", "quiet", "lead" or "warn"."""

    kind: ClassVar[str] = "words"
    lines: tuple[Line, ...]
    look: str = ""


@dataclass(frozen=True)
class Code:
    kind: ClassVar[str] = "code"
    text: str


@dataclass(frozen=True)
class Facts:
    """Names and what is said of each."""

    kind: ClassVar[str] = "facts"
    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Group:
    """Blocks under a heading of their own; `folded`, behind one that a reader opens."""

    kind: ClassVar[str] = "group"
    title: str
    blocks: tuple[Block, ...]
    folded: bool = False


Block = Table | Figures | Words | Code | Facts | Group


@dataclass(frozen=True)
class Part:
    """One heading of a section with its blocks; `caveats` stand before them."""

    title: str
    blocks: tuple[Block, ...]
    caveats: tuple[str, ...] = ()


def cell(shown: str, value: str | float | None = None, beside: str = "") -> Cell:
    """A cell that shows `shown` and sorts by `value`, if that is a number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and shown != NONE
    return Cell(shown, value if is_number else None, beside)


def sentences(lines: Iterable[str], look: str = "") -> list[Block]:
    """Sentences as a block; none without any."""
    said = tuple(Line(line) for line in lines if line)
    return [Words(said, look)] if said else []


def figures(charts: Sequence[Chart]) -> list[Block]:
    """The charts as one block; no block without charts."""
    return [Figures(tuple(charts))] if charts else []


def grid(
    caption: str, rows: Sequence[TableRow], columns: Sequence[Column], *, cards: bool = True, hidden: bool = False
) -> Table:
    """A table of columns; where a column has a number behind its text, the page carries it too."""
    columns = without_gaps(columns, rows)
    cells = [[cell(c.cell(row), c.raw(row) if i else None) for i, c in enumerate(columns)] for row in rows]
    return Table(caption, [c.title for c in columns], cells, cards, hidden)
