"""What tables of a model before and after surgery have in common: rows of its shape, its parameters, their change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tabulate import tabulate

from leansurgeon.shape import NUMBERS, PARTS, ParameterCount, Shape


def draw_table(rows: Sequence[Sequence[object]], heads: Sequence[str], align: Sequence[str] | None = None) -> list[str]:
    """A table as lines; cells stand as they are written, at the left or as `align` says of each column."""
    return tabulate(rows, headers=heads, colalign=align, disable_numparse=True).splitlines()


def side_by_side(rows: Sequence[Sequence[str]], heads: Sequence[str]) -> list[str]:
    """A table of names, two columns of figures, and what is said of both."""
    return draw_table(rows, heads, ("left", "right", "right", "right"))


def shapes(before: Shape, after: Shape, keys: Iterable[str] = NUMBERS) -> list[list[str]]:
    """A row for each of these numbers of a shape."""
    return [[NUMBERS[key], before.column(key), after.column(key), ""] for key in keys]


def parameters(before: ParameterCount, after: ParameterCount) -> list[list[str]]:
    """A row for every part, with its change."""
    counts = ((f"parameters, {label}", getattr(before, key), getattr(after, key)) for key, label in PARTS.items())
    return [numbers(*count) for count in counts]


def numbers(label: str, a: int, b: int) -> list[str]:
    """A row of two counts and their change."""
    return [label, f"{a:,}", f"{b:,}", change(a, b)]


def change(before: int, after: int) -> str:
    """The relative change in per cent; empty where there is none, `new` where nothing was before."""
    return "" if before == after else f"{100 * (after / before - 1):+.1f} %" if before else "new"
