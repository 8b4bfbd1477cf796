"""What tables of a model before and after surgery have in common: rows of its shape, its parameters, their change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tabulate import tabulate

from leansurgeon.shape import NUMBERS, PARTS, Shape


def draw_table(rows: Sequence[Sequence[object]], heads: Sequence[str], align: Sequence[str] | None = None) -> list[str]:
    """A table as lines; cells stand as they are written, at the left or as `align` says of each column."""
    return tabulate(rows, headers=heads, colalign=align, disable_numparse=True).splitlines()


def side_by_side(rows: Sequence[Sequence[str]], heads: Sequence[str]) -> list[str]:
    """A table of names, two columns of figures, and what is said of both."""
    return draw_table(rows, heads, ("left", "right", "right", "right"))


def shapes(before: Shape, after: Shape, keys: Iterable[str] = NUMBERS) -> list[list[str]]:
    """A row for each of these numbers of a shape."""
    return [[NUMBERS[key], before.column(key), after.column(key), ""] for key in keys]


def parameters(before: Mapping[str, int], after: Mapping[str, int]) -> list[list[str]]:
    """A row for every part that both say, with its change."""
    known = {key: label for key, label in PARTS.items() if key in before and key in after}
    return [numbers(f"parameters, {label}", before[key], after[key]) for key, label in known.items()]


def numbers(label: str, a: int, b: int) -> list[str]:
    """A row of two counts and their change."""
    return [label, f"{a:,}", f"{b:,}", change(a, b)]


def change(before: int, after: int) -> str:
    """The relative change in per cent; empty where there is none, `new` where nothing was before."""
    return "" if before == after else f"{100 * (after / before - 1):+.1f} %" if before else "new"
