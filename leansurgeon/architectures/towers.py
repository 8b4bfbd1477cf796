"""Which part of a model of several is meant: what the user has chosen for this command and the processes it starts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

CHOSEN = "LEANSURGEON_TOWER"  # how a command tells the processes that it starts
# Where configs describe them, the usual place first.
SECTIONS = {
    "text": ("text_config", "decoder"),
    "vision": ("vision_config",),
    "audio": ("audio_config", "encoder_config"),
}


def choose(tower: str | None) -> None:
    """From now on this tower is meant; None: no tower is named."""
    if tower:
        os.environ[CHOSEN] = tower
    else:
        os.environ.pop(CHOSEN, None)


def chosen_tower() -> str | None:
    """The tower that the user has named."""
    name = os.environ.get(CHOSEN)
    return name if name in SECTIONS else None


@contextmanager
def meant(tower: str | None) -> Iterator[None]:
    """This tower is meant as long as this lasts; None: whatever was meant before."""
    before = chosen_tower()
    choose(tower or before)
    try:
        yield
    finally:
        choose(before)


def of_section(section: str | None) -> str | None:
    """The tower that a part of a config describes."""
    return next((tower for tower, known in SECTIONS.items() if section in known), None)


def whole_runs(section: str, config: Mapping[str, Any]) -> bool:
    """Whether a model runs on what the part that is meant reads: it is no tower of several, or writes text."""
    return not section or writes_text(section, (config.get("architectures") or [""])[0])


def writes_text(section: str, cls: str) -> bool:
    """Whether a model of several towers says words where it is given words alone: its text tower is meant, and its
    class has a head for it.
    """
    return section == SECTIONS["text"][0] and cls.endswith(("ForConditionalGeneration", "ForImageTextToText"))
