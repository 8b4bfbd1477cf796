"""Text for a terminal of 80 columns."""

from __future__ import annotations

import textwrap


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
