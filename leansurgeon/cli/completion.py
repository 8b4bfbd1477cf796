"""What a shell offers for a word half typed: presets, recipes, families, runs and models here. No torch, and nothing
slow: it runs at every press of the tab key. Where nothing fits, shells offer files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import typer

MOST = 200  # folders that are looked into
WORKSPACE = "runs"
MARKS = ("config.json", "model/config.json", "recipe.yaml")


def sources(ctx: typer.Context, incomplete: str) -> list[str]:
    """Presets, runs in the workspace, and folders here that hold a model."""
    from leansurgeon.architectures.presets import PRESETS

    return fitting([*models_of(ctx, incomplete), *PRESETS], incomplete)


def models(ctx: typer.Context, incomplete: str) -> list[str]:
    """Runs in the workspace and folders here that hold a model."""
    return fitting(models_of(ctx, incomplete), incomplete)


def recipes(incomplete: str) -> list[str]:
    """Names of shipped recipes, and recipe files here."""
    from leansurgeon.training.recipe.shipped import shipped

    with suppress(OSError):
        return fitting([*shipped(), *(file.name for file in Path.cwd().glob("*.yaml"))], incomplete)
    return fitting(shipped(), incomplete)


def families(incomplete: str) -> list[str]:
    """Model types, as in config.json, that are declared."""
    from leansurgeon import architectures

    return fitting({kind for family in architectures.known().values() for kind in family.model_types}, incomplete)


def gpus(incomplete: str) -> list[str]:
    """Names of the GPUs whose memory is known."""
    from leansurgeon.measure.costs.gpus import GPUS

    return fitting(GPUS, incomplete)


def fitting(words: Iterable[str], incomplete: str) -> list[str]:
    """Those that begin with what was typed, each once."""
    return [word for word in dict.fromkeys(words) if word.startswith(incomplete)]


def models_of(ctx: typer.Context, incomplete: str) -> Iterator[str]:
    """Paths of models and runs: in the workspace, in the folder that was typed so far, and here."""
    workspace = Path(ctx.params.get("workspace") or WORKSPACE)
    typed = incomplete.rpartition("/")[0]
    for place in dict.fromkeys([workspace, Path(typed or ("/" if incomplete.startswith("/") else "."))]):
        for folder in folders(place):
            if is_model(folder):
                yield str(folder)
            elif place == workspace and (arms := list(filter(is_model, folders(folder)))):  # of an experiment
                yield from map(str, (folder, *arms))


def is_model(folder: Path) -> bool:
    """Whether a folder holds a model or a run."""
    with suppress(OSError):
        return any((folder / mark).is_file() for mark in MARKS)
    return False


def folders(place: Path) -> list[Path]:
    """The folders of a place that are not hidden, by name; of too many the first that the system names."""
    with suppress(OSError):
        inside = (folder for folder in place.iterdir() if not folder.name.startswith(".") and folder.is_dir())
        return sorted(islice(inside, MOST))
    return []
