"""Shell completion: presets, recipes, families, GPUs. No torch, and nothing slow, since it runs at every press of the
tab key. If nothing fits, shells offer files.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def sources(incomplete: str) -> list[str]:
    """Complete presets."""
    from leansurgeon.architectures.presets import PRESETS

    return fitting(PRESETS, incomplete)


def recipes(incomplete: str) -> list[str]:
    """Complete shipped recipes, and recipe files in the current folder."""
    from leansurgeon.training.recipe.shipped import list_shipped

    return fitting([*list_shipped(), *(file.name for file in Path().glob("*.yaml"))], incomplete)


def families(incomplete: str) -> list[str]:
    """Complete declared model types, as in config.json."""
    from leansurgeon import architectures

    return fitting(
        {kind for family in architectures.load_families().values() for kind in family.model_types}, incomplete
    )


def gpus(incomplete: str) -> list[str]:
    """Complete GPUs whose memory is known."""
    from leansurgeon.measure.costs.gpus import GPUS

    return fitting(GPUS, incomplete)


def fitting(words: Iterable[str], incomplete: str) -> list[str]:
    """Return the words that begin with `incomplete`, each once."""
    return [word for word in dict.fromkeys(words) if word.startswith(incomplete)]
