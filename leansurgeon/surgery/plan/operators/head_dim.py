"""Heads of another size: by splitting what is there, or afresh; and what has to hold for either."""

from __future__ import annotations

from dataclasses import replace

from leansurgeon.checkpoints.recorded.planned import Step
from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import UnsupportedModel, UsageError
from leansurgeon.shape import Stage, nearest_divisible
from leansurgeon.surgery.layer import canonical
from leansurgeon.surgery.plan.method import Method
from leansurgeon.surgery.plan.operators import fresh, heads


def other_head_dim(source: Source, before: Stage, after: Stage, init: str, method: Method, calibrated: bool) -> Step:
    """The operator for heads of another size. Raises `UsageError` where what the heads have learned would be lost
    without the user having said so.
    """
    if init == "fresh-attention" or not source.learned:
        return fresh.attention_operator(before, after)
    pair = f"{before.heads} heads of {before.head_dim} cannot become {after.heads} of {after.head_dim}"
    afresh = "--init fresh-attention starts q, k, v afresh, --init fresh the whole model (the paper's way)."
    if after.heads % before.heads:
        near = nearest_divisible(after.heads, before.heads)
        keep = "--head-dim keep adds or trims heads of the same size. " if keeps_size(source) else ""
        raise UsageError(f"{pair} by splitting; whole children: {near} heads.", keep + afresh)
    if after.inner < before.inner:
        least = -(-before.inner // after.heads)
        raise UsageError(f"{pair}: together they cannot hold {before.inner} values; head_dim must be {least}.", afresh)
    if before.kv_heads != before.heads:
        raise UnsupportedModel(
            f"{pair}: {before.heads} query heads share {before.kv_heads} key/value heads, which cannot be divided.",
            "--head-dim keep makes more heads of the same size.",
        )
    if reason := canonical.splittable(source):
        raise UnsupportedModel(f"{pair}: {reason}", afresh)
    if canonical.rotary(source):
        also = "--head-dim keep adds heads of the same size. " if source.architecture.stores_head_dim else ""
        raise UnsupportedModel(f"{pair}: rotary positions belong to pairs of a head's entries.", also + afresh)
    if after.head_dim < before.head_dim and not (calibrated or method.uncalibrated):
        raise UsageError(
            f"{pair} without sample data: the weights alone do not say which part of a head's scores matters.",
            f"Add --calibrate DATA; or accept less with --uncalibrated. {afresh}",
        )
    step = heads.split_operator(before, after, calibrated=calibrated)
    if step.exactness == "exact" and is_coarse(source):  # q and k are rescaled, which such numbers round
        step = replace(step, exactness="near", says=step.says + ", rounded to the weights' precision")
    return step


def keeps_size(source: Source) -> bool:
    """Whether some family can hold heads of the same size whose number changes."""
    return source.architecture.stores_head_dim or source.architecture.decoupled is not None


def is_coarse(source: Source) -> bool:
    """Whether attention weights are stored with fewer bits than fp32."""
    entries = source.weights.entries
    return any(entries[s.name].dtype not in ("F32", "F64") for s in source.specs if s.role in ("q", "k", "qk", "qkv"))


def check_children(source: Source) -> None:
    """Raises `UnsupportedModel` where heads of the same size cannot have children (channel attention)."""
    if reason := canonical.supported(source):
        raise UnsupportedModel(f"Heads cannot be split here: {reason}", "Use --more-heads add.")
