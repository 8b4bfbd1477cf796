"""What a shell offers for a word half typed: presets, recipes, families, GPUs. No torch, and nothing slow: it runs at
every press of the tab key. Where nothing fits, shells offer files.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def sources(incomplete: str) -> list[str]:
    """Presets."""
    from leansurgeon.architectures.presets import PRESETS

    return fitting(PRESETS, incomplete)


def recipes(incomplete: str) -> list[str]:
    """Names of shipped recipes, and recipe files here."""
    from leansurgeon.training.recipe.shipped import list_shipped

    return fitting([*list_shipped(), *(file.name for file in Path().glob("*.yaml"))], incomplete)


def families(incomplete: str) -> list[str]:
    """Model types, as in config.json, that are declared."""
    from leansurgeon import architectures

    return fitting(
        {kind for family in architectures.load_families().values() for kind in family.model_types}, incomplete
    )


def gpus(incomplete: str) -> list[str]:
    """Names of the GPUs whose memory is known."""
    from leansurgeon.measure.costs.gpus import GPUS

    return fitting(GPUS, incomplete)


def fitting(words: Iterable[str], incomplete: str) -> list[str]:
    """Those that begin with what was typed, each once."""
    return [word for word in dict.fromkeys(words) if word.startswith(incomplete)]
