"""Text for a terminal of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence


def wrap(text: str, indent: str = "") -> list[str]:
    """Lines of at most 80 columns; what is longer in one piece (a path) stays whole."""
    return textwrap.wrap(text, 80, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def short(words: str, room: int) -> str:
    """At most `room` columns; the middle gives way, since a path or a list says most at its ends.

    >>> short("/home/someone/runs/digits-vit/lean", 20)
    '/home...its-vit/lean'
    """
    front = (room - 3) // 3
    return words if len(words) <= room else f"{words[:front]}...{words[front + 3 - room :]}"


def runs(numbers: Sequence[int]) -> str:
    """Neighbours as a range.

    >>> runs([0, 1, 2, 5])
    '0-2, 5'
    """
    found: list[list[int]] = []
    for i in numbers:
        if found and found[-1][-1] == i - 1:
            found[-1].append(i)
        else:
            found.append([i])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found)
