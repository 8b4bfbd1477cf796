"""Words and numbers in lines of 80 columns, for everything that prints."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

WIDTH = 80
UNIT = re.compile(r"(?<=\d) (?=(?:%|[KMGT]iB|ms|s|min|h)(?![\w]))")  # the space between a number and its unit
FORMULA = ("=", "+", "-", "@")


def wrap(text: str, indent: str = "") -> list[str]:
    """Return lines of at most 80 columns; a longer single word (a path) stays whole, and a number keeps its unit."""
    together = UNIT.sub("\u00a0", text)
    lines = textwrap.wrap(together, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\u00a0", " ") for line in lines]


def in_columns(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return heads, rule and rows, the first column aligned left and the others right, with two spaces between columns
    (tabulate would pad every head by two more).
    """
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = [heads, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in lines
    )


def ranges(numbers: Sequence[int]) -> str:
    """Return numbers as text, with consecutive ones as a range.

    >>> ranges([0, 1, 2, 5])
    '0-2, 5'
    """
    runs = []
    for i in numbers:
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def in_markdown(text: str) -> str:
    r"""Return text escaped for Markdown, on one line, also for cells of tables.

    >>> print(in_markdown("a|b_c<i>"))
    a\|b\_c\<i\>
    """
    return re.sub(r"([\\`*_{}\[\]<>|~&])", r"\\\1", " ".join(text.split()))


def harmless(cell: object) -> object:
    """Return a CSV cell that no spreadsheet takes for a formula: such text gets a `'` in front, and control characters
    become `?`.

    >>> harmless("=1+1"), harmless("-lean"), harmless(-0.5)
    ("'=1+1", "'-lean", -0.5)
    """
    if not isinstance(cell, str):
        return cell
    shown = "".join(c if c.isprintable() else "?" for c in cell)
    return f"'{shown}" if shown.lstrip().startswith(FORMULA) else shown
