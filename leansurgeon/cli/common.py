"""What the commands share: how they talk. stdout is data; this goes to stderr."""

from __future__ import annotations

import os
import sys

from leansurgeon.words import wrap


def say(text: str) -> None:
    """Talk on stderr, in lines of 80 columns. Of the processes of one training only the first speaks."""
    if os.environ.get("RANK", "0") != "0":
        return
    for line in text.split("\n"):
        print("\n".join(wrap(line, "  ")), file=sys.stderr, flush=True)
