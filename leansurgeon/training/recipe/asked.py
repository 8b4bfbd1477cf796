"""What is asked of a recipe that is named or made for a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Asked:
    """What was typed that decides on the recipe of a training: its data or its name, and what shall be otherwise."""

    data: str | None = None
    time: str | None = None
    columns: str | None = None
    new_tokenizer: bool = False
    recipe: str | None = None
    sets: tuple[str, ...] = ()
    resume: str = "never"
    lora: int | None = None
