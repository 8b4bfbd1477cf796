"""Where values of somebody's config meet rules and libraries that do not expect them: whatever these raise is one
sentence about the config.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from leansurgeon.errors import LeanSurgeonError, UnsupportedModel, disk_is_full, memory_is_short, quote

# What a rule such as `c["hidden_size"] // c["patch_size"]` raises for a value that is missing or of another kind.
UNFIT = (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, IndexError, OverflowError)


@contextmanager
def rules_of(family: str) -> Iterator[None]:
    """Let a family's rules read a config; raises `UnsupportedModel` where it lacks what they need."""
    try:
        yield
    except UNFIT as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else "a value is missing or out of range"
        raise UnsupportedModel(
            f"The config does not say what a {family} model needs: {what}.", "Is config.json complete?"
        ) from error


@contextmanager
def library_builds(what: str) -> Iterator[None]:
    """Let a library build, or load, `what` from a config that it did not write; raises `UnsupportedModel` with its
    reason where it refuses, since libraries refuse in every way there is.
    """
    try:
        yield
    except (LeanSurgeonError, MemoryError):
        raise
    except Exception as error:
        if memory_is_short(error) or disk_is_full(error):
            raise
        raise UnsupportedModel(
            f"{what} cannot be built from its config and weights{in_words(error)}.", "Do they belong together?"
        ) from error


def in_words(error: Exception) -> str:
    """What a library itself says of a config, where it is a sentence of its own and not one of Python or torch."""
    if isinstance(error, KeyError) and error.args:
        return f": it knows no {quote(error.args[0])}"
    if isinstance(error, TypeError) and (extra := re.search(r"unexpected keyword argument '(.+)'", str(error))):
        return f": it takes no {quote(extra[1])}"
    last = traceback.extract_tb(error.__traceback__)[-1].line or ""
    said = " ".join(str(error).split()).rstrip(".")
    of_library = isinstance(error, ValueError) and last.startswith("raise ") and " " in said and "Error" not in said
    return f": {said[:300]}" if of_library else ""
