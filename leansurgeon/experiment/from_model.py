"""An experiment for the user's own model and data: the original, lean variants and their controls, all cut from the
model as it is and trained alike, with the recipe that `retrain --data` would make.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import LeanSurgeonError, UsageError, did_you_mean
from leansurgeon.experiment.arms import wanted_by_arm, wanted_shape_of
from leansurgeon.progress import Say
from leansurgeon.reading.cache_folder import cache_folder
from leansurgeon.surgery.planning import plan, reshape_source
from leansurgeon.tasks import user_data
from leansurgeon.training.recipe import from_model, reading
from leansurgeon.training.recipe.schema import Arm, ExperimentRecipe, TrainingRecipe

KEYS = ("heads", "layers", "head_dim", "mlp_dim")
STEPS_OF_RATE = (1 / 3, 1, 3)  # times the usual learning rate
KAPPA = {"samples": 16, "probes": 0}  # measured for every arm, takes seconds


def parse_variants(texts: Sequence[str]) -> dict[str, dict[str, str]]:
    """Parse texts such as `lean:heads=24,layers=4` into shapes by name. Raises `UsageError`."""
    found: dict[str, dict[str, str]] = {}
    for text in texts:
        name, colon, rest = text.partition(":")
        pairs = [part.partition("=") for part in re.split(r",(?=\w+=)", rest)]
        shape = {key.strip(): value.strip() for key, _, value in pairs}
        if not colon or not re.fullmatch(r"\w[\w.-]*", name) or not all(shape.values()):
            raise UsageError(f"--variant {text}: write NAME:heads=24,layers=4.")
        if unknown := [key for key in shape if key not in KEYS]:
            near = did_you_mean(unknown[0], KEYS)
            raise UsageError(
                f"--variant {text}: {unknown[0]!r} is no part of a shape{near}.", f"Give {', '.join(KEYS)}."
            )
        if name in found or name == "original":
            raise UsageError(f"--variant {text}: the name {name} is taken.", "Give each variant a name of its own.")
        found[name] = shape
    return found


def name_experiment(source: Source, data: str, sets: Sequence[str]) -> str:
    """Return a name such as `model-reviews`, or that of --set name=NAME."""
    named = [text.partition("=")[2] for text in sets if text.startswith("name=")]
    return named[-1] if named else f"{from_model.name_of(Path(source.folder))}-{user_data.recognise(data).slug}"


def make_experiment(
    source: Source,
    data: str,
    variants: Mapping[str, Mapping[str, str]],
    seeds: Sequence[int],
    seconds: float | None,
    parallel: int,
    columns: str | None,
    sets: Sequence[str],
    say: Say,
) -> ExperimentRecipe:
    """Return the recipe: its arms, the task and settings that all share, and three learning rates around the usual one.

    If everything must fit into `seconds`, with `parallel` trainings side by side, batches are small enough for that.
    Raises `UsageError` if model, data and shapes do not fit together.
    """
    for name, shape in variants.items():  # refuse impossible shapes before reading data
        try:
            plan(source, wanted_by_arm(Arm.model_validate(shape)), 0, calibrated=True)
        except LeanSurgeonError as error:
            error.message = f"{name}: {error.message}"
            raise
        except ValueError:  # only head_dim accepts no text but a few words
            said = f"{name}: head_dim {shape.get('head_dim')}: give auto, keep, split or a number."
            raise UsageError(said) from None
    own = [text for text in sets if text.partition("=")[0].split(".")[0] in TrainingRecipe.model_fields]
    each = seconds and seconds * parallel / (2 * (1 + 2 * len(variants)) * len(seeds))
    asked = from_model.RecipeInputs(
        data, f"{max(1, each):.0f}s" if each else None, columns, sets=tuple(own), compares=True
    )
    training = from_model.make_recipe(Path(source.folder), user_data.recognise(data), asked, cache_folder(), say)
    raw = reading.plain(training)
    optim = raw["train"]["optim"]
    optim.pop("full_steps", None)  # use the rates to be tried as they are
    rates = [float(f"{optim['lr'] * times:.2g}") for times in STEPS_OF_RATE]
    arms: dict[str, Any] = {"original": {}} | {name: {**shape, "heal": "local"} for name, shape in variants.items()}
    if training.train.distill and training.train.distill.logits == 0:
        arms["original"] = {"train": {"duration": "1st"}}  # it would learn its own embeddings
    raw |= {"kind": "experiment", "source": str(source.folder), "cut_from": "source", "seeds": list(seeds)}
    fixed = any(text.startswith("train.optim.lr=") for text in sets)
    raw |= {"rates": [] if fixed else rates, "measure": {"kappa": KAPPA}, "arms": arms}
    for name in variants:
        control = "control" if len(variants) == 1 else f"control-{name}"
        whole = ExperimentRecipe.model_validate(raw | {"arms": arms | {control: {"control_of": name}}})
        if is_control(control, whole, source):
            arms[control] = {"control_of": name}
    return reading.check_recipe(raw | {"arms": arms}, [text for text in sets if text not in own], f"--data {data}")


def is_control(name: str, recipe: ExperimentRecipe, source: Source) -> bool:
    """Return whether a control's shape differs from the source and from the arm that it controls: otherwise it shows
    nothing.
    """
    wanted = [wanted_shape_of(arm, recipe, source) for arm in (name, recipe.arms[name].control_of)]
    shape, lean = (reshape_source(source, one)[0].shape for one in wanted)
    return shape not in (source.shape, lean)
