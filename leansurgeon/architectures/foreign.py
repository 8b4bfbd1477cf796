"""Turn errors of rules and libraries on somebody else's config into one sentence about that config."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from leansurgeon.errors import LeanSurgeonError, UnsupportedModel, disk_is_full, memory_is_short

# What a rule such as `c["hidden_size"] // c["patch_size"]` raises for a missing value or one of another kind.
UNFIT = (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, IndexError, OverflowError)


@contextmanager
def rules_of(family: str) -> Iterator[None]:
    """Run a family's rules on a config. Raises `UnsupportedModel` if the config lacks what they need."""
    try:
        yield
    except UNFIT as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else "a value is missing or out of range"
        raise UnsupportedModel(
            f"The config does not say what a {family} model needs: {what}.", "Is config.json complete?"
        ) from error


@contextmanager
def library_builds(what: str) -> Iterator[None]:
    """Let a library build or load `what` from somebody else's config.

    Whatever error it raises becomes an `UnsupportedModel` with its reason.
    """
    try:
        yield
    except (LeanSurgeonError, MemoryError):
        raise
    except Exception as error:
        if memory_is_short(error) or disk_is_full(error):
            raise
        said = " ".join(str(error).split())[:300].rstrip(".")
        raise UnsupportedModel(
            f"{what} cannot be built from its config and weights ({said}).", "Do they belong together?"
        ) from error
