"""What every arm of an experiment wants: its shape, the control's MLP and how to cut it; and which arms a `--set`
changes, since those that start from trained weights have their own settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from leansurgeon.checkpoints.reshaped import Reshaped
from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import LeanSurgeonError, UnsupportedModel, UsageError, did_you_mean
from leansurgeon.measure.costs.flops import closed_form
from leansurgeon.reading.jsonfile import value_at
from leansurgeon.shape import Stage
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.planning import plan, reshape_source
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.training.recipe.schema import Arm, ExperimentRecipe


def base_arm(recipe: ExperimentRecipe) -> str:
    """Return the arm that is the source itself. Lean arms with transferred weights are cut from its trained model."""
    plain = [name for name, arm in recipe.arms.items() if not arm.changes_shape and arm.control_of is None]
    if not plain:
        raise UsageError(
            f"The experiment '{recipe.name}' has no arm for the original.", "Add `original: {}` to its arms."
        )
    return plain[0]


def choose_arms(
    recipe: ExperimentRecipe, names: Sequence[str] | None, wanted: Mapping[str, RequestedShape]
) -> list[str]:
    """Return the arms with these names (None: all) in the recipe's order, and the original if one of them is cut from
    it.

    Raises `UsageError` for no name, a repeated name, or one that the recipe does not have.
    """
    if names is None:
        return list(recipe.arms)
    if not any(names) or len(set(names)) < len(names):
        raise UsageError(
            f"{'An arm is named twice' if any(names) else 'No arm is named'}: {', '.join(names)}.",
            f"Arms of '{recipe.name}': {', '.join(recipe.arms)}.",
        )
    for name in names:
        if name not in recipe.arms:
            raise UsageError(
                f"The experiment '{recipe.name}' has no arm '{name}'{did_you_mean(name, recipe.arms)}.",
                f"Arms: {', '.join(recipe.arms)}.",
            )
    original = {base_arm(recipe)} if any(wanted[name].init == "transfer" for name in names) else set()
    return [name for name in recipe.arms if name in original.union(names)]


def list_wanted_shapes(recipe: ExperimentRecipe, source: Source) -> dict[str, RequestedShape]:
    """Return the shape that every arm wants, in the recipe's order.

    An impossible one is refused, by name, before anything runs; controls come last, since they depend on the arm that
    they control.
    """
    wanted_by_arm = {}
    for name in sorted(recipe.arms, key=lambda name: recipe.arms[name].control_of is not None):
        try:
            wanted_by_arm[name] = wanted_shape_of(name, recipe, source)
            method = method_of(name, recipe)
            plan(source, wanted_by_arm[name], 0, method, calibrated=not method.uncalibrated)
        except LeanSurgeonError as error:
            error.message = f"Arm '{name}': {error.message}"
            raise
    return {name: wanted_by_arm[name] for name in recipe.arms}


def wanted_shape_of(name: str, recipe: ExperimentRecipe, source: Source) -> RequestedShape:
    """Return the wanted shape of an arm; a control's MLP is solved for the parameters (or the forward FLOPs) of the arm
    that it controls.
    """
    arm = recipe.arms[name]
    if arm.control_of is None:
        return wanted_by_arm(arm)
    lean_arm = recipe.arms[arm.control_of]
    lean = wanted_by_arm(lean_arm)
    size = parameters_of if arm.match != "flops" else flops_of
    narrow = replace(lean, heads=None, head_dim="keep", mlp_dim=None, mlp_ratio=None, init=arm.init or lean.init)
    widths = equal_mlp(source, narrow, size(reshape_source(source, lean)[0]), size)
    return replace(narrow, mlp_dim=",".join(str(m) for m in widths))


def parameters_of(reshaped: Reshaped) -> int:
    """Return all parameters of a model at another shape."""
    return reshaped.parameters.total


def flops_of(reshaped: Reshaped) -> int:
    """Return the forward operations of one sample of the family's usual length. Raises `UnsupportedModel` for families
    without a closed form.
    """
    flops = closed_form(reshaped.specs, reshaped.shape, reshaped.config(), reshaped.architecture)
    if flops is None:
        raise UnsupportedModel(
            f"{reshaped.architecture.name} has no closed form for its FLOPs, so no control can match them.",
            "Leave `match: flops` out: a control of equal parameters is possible.",
        )
    return flops.total


def wanted_by_arm(arm: Arm) -> RequestedShape:
    given = {key: getattr(arm, key) for key in ("heads", "layers", "head_dim", "mlp_dim")}
    texts = {key: str(value) for key, value in given.items() if value is not None}
    return RequestedShape(**texts, mlp_ratio=arm.mlp_ratio, init=arm.init or "transfer")


def equal_mlp(
    source: Source, wanted: RequestedShape, size: int, of: Callable[[Reshaped], int] = parameters_of
) -> list[int]:
    """Return the MLP widths (scaled alike in every stage) at which `of`, which is linear in them, is
    nearest to `size`.
    """
    target, _ = reshape_source(source, wanted)

    def at(scale: float) -> tuple[list[Stage], int]:
        stages = [replace(s, mlp_dim=max(1, round(s.mlp_dim * scale))) for s in target.shape.stages]
        shape = replace(target.shape, stages=tuple(stages))
        return stages, of(target.at(shape))

    low, high = at(1.0)[1], at(2.0)[1]
    scale = 1.0 + (size - low) / (high - low)
    if scale <= 0:
        raise UsageError("The control is larger than the lean model even without an MLP.", "Leave the control out.")
    return [s.mlp_dim for s in at(scale)[0]]


def method_of(name: str, recipe: ExperimentRecipe) -> Method:
    """Return how to cut an arm, calibrated unless it is `uncalibrated`; a control is cut like its arm unless it says
    otherwise.
    """
    arm = recipe.arms[name]
    other = recipe.arms[arm.control_of] if arm.control_of else arm

    def of(key: str, default: Any) -> Any:
        return next((v for a in (arm, other) if (v := getattr(a, key)) is not None), default)

    method = Method(
        layers=of("method", "auto"),
        more=of("more_heads", "add"),
        heal=of("heal", "closed"),
        uncalibrated=not of("calibrate", True),
    )
    method.check(not method.uncalibrated)
    return method


def explain_sets(recipe: ExperimentRecipe, sets: Iterable[str], before: ExperimentRecipe) -> list[str]:
    """For every `train.x=y` of `sets` that not all arms use, explain which do and how to reach the others. A value that
    the recipe already had in `before` changes nothing.
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
    """Return whether an arm starts from the trained original."""
    arm = recipe.arms[name]
    arm = recipe.arms[arm.control_of] if arm.control_of else arm
    return arm.changes_shape and arm.init != "fresh"
