"""The tower of a multi-tower model that the user selected for this command and its child processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

CHOSEN = "LEANSURGEON_TOWER"  # passes the choice on to child processes
# The parts of configs that describe each tower, the usual one first.
SECTIONS = {
    "text": ("text_config", "decoder"),
    "vision": ("vision_config",),
    "audio": ("audio_config", "encoder_config"),
}


def choose(tower: str | None) -> None:
    """Select a tower from now on; None selects none."""
    if tower:
        os.environ[CHOSEN] = tower
    else:
        os.environ.pop(CHOSEN, None)


def chosen_tower() -> str | None:
    """Return the tower that the user selected."""
    name = os.environ.get(CHOSEN)
    return name if name in SECTIONS else None


@contextmanager
def meant(tower: str | None) -> Iterator[None]:
    """Select a tower for the duration of the block; None keeps the current selection."""
    before = chosen_tower()
    choose(tower or before)
    try:
        yield
    finally:
        choose(before)


def of_section(section: str | None) -> str | None:
    """Return the tower that a part of a config describes."""
    return next((tower for tower, known in SECTIONS.items() if section in known), None)


def writes_text(section: str, cls: str) -> bool:
    """Return whether a multi-tower model writes text from text alone.

    That is the case if its text tower is selected and its class has a head for it.
    """
    return section == SECTIONS["text"][0] and cls.endswith(("ForConditionalGeneration", "ForImageTextToText"))
