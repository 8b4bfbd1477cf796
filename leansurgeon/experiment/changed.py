"""Which arms of an experiment a `--set` changes: those that go on from trained weights have settings of their own."""

from __future__ import annotations

from collections.abc import Iterable

from leansurgeon.reading.jsonfile import value_at
from leansurgeon.training.recipe.schema import ExperimentRecipe


def sentences(recipe: ExperimentRecipe, sets: Iterable[str], before: ExperimentRecipe) -> list[str]:
    """For every `train.x=y` of `sets` that not all arms take: which do, and how to reach the others. One that sets what
    the recipe said `before` changes nothing.
    """
    told, now, then = [], recipe.train.model_dump(), before.train.model_dump()
    for text in sets:
        key = text.partition("=")[0].strip()
        if not key.startswith("train."):
            continue
        path = key.split(".")[1:]
        if value_at(now, *path) == value_at(then, *path):
            continue
        kept = [name for name in recipe.arms if continues(recipe, name) and value_at(recipe.retrain, *path) is not None]
        took = [name for name in recipe.arms if name not in kept]
        if kept:
            told.append(
                f"--set {text} changes {', '.join(took)}; {', '.join(kept)} continue from trained weights with "
                f"settings of their own: --set re{text}."
            )
    return told


def continues(recipe: ExperimentRecipe, name: str) -> bool:
    """Whether an arm starts from the trained original."""
    arm = recipe.arms[name]
    arm = recipe.arms[arm.control_of] if arm.control_of else arm
    return arm.changes_shape and arm.init != "fresh"
