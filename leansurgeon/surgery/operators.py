"""Order the operators that lead from one shape to another: what each promises, and what it requires."""

from __future__ import annotations

from dataclasses import replace

from leansurgeon.checkpoints.record import Step
from leansurgeon.checkpoints.reshaped import Reshaped
from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import UnsupportedModel, UsageError, plural
from leansurgeon.shape import Stage, nearest_divisible
from leansurgeon.surgery import balance, canonical
from leansurgeon.surgery.drop_layers import LayerChoice
from leansurgeon.surgery.method import LAYERS, Method

LOCAL = Step(
    "fit-locally", "near", "fit the blocks around every cut together, in a span that grows while the guard gains"
)
TOGETHER = Step(
    "fit-locally",
    "near",
    "fit blocks whose heads were divided together, in a span that grows while the guard gains",
)
SHORT = 8  # maximum number of layers in a stage that is fitted as one
HEAL = Step("heal", "near", "refit output projections on sample data; each is kept where guard samples gain")


def order_operators(
    target: Reshaped, init: str, choice: LayerChoice, method: Method, calibrated: bool, heads_by: str | None
) -> tuple[Step, ...]:
    """Return the steps from the source to the target, in the order in which they are applied. `heads_by` describes what
    chooses the heads to keep.
    """
    source = target.source
    if method.balance and init == "fresh":
        raise UsageError(
            f"--balance keeps what a model computes, and --init {init} forgets it.", "Leave --balance out."
        )
    if init == "fresh":
        says = "the preset has no weights" if source.weights is None else "nothing of the source's weights is kept"
        return (Step("fresh", "fresh", f"initialise the whole model by the library's own rules; {says}"),)
    steps = []
    stages = list(zip(source.shape.stages, target.shape.stages, strict=True))
    for number, ((before, after), span) in enumerate(zip(stages, source.shape.spans, strict=True), 1):
        of_stage = []
        if after.depth < before.depth:
            kept = [i - span.start for i in choice.kept if i in span]
            dropped = [i for i in range(before.depth) if i not in kept]
            there = f"{len(kept)} of {plural(before.depth, 'layer')}"
            says = f"keep {there}, {choice.criterion}: {', '.join(map(str, kept))}"
            found = {"criterion": choice.criterion, "evidence": choice.evidence}
            of_stage.append(Step("drop-layers", "near", says, {"kept": kept, "dropped": dropped, **found}))
        if after.head_dim != before.head_dim:
            of_stage.append(resize_heads(source, before, after, init, method, calibrated))
        elif after.heads != before.heads:
            if after.heads > before.heads and method.more == "split" and (reason := canonical.why_unsupported(source)):
                raise UnsupportedModel(f"Heads cannot be split here: {reason}", "Use --more-heads add.")
            of_stage.append(change_heads(before, after, method.more, calibrated=calibrated, by=heads_by))
        if after.mlp_dim != before.mlp_dim:
            units = {"before": before.mlp_dim, "after": after.mlp_dim}
            if after.mlp_dim < before.mlp_dim:
                by = "that matter most on the calibration data" if calibrated else "with the largest weights"
                says = f"keep the {after.mlp_dim} of {before.mlp_dim} MLP units {by}"
                of_stage.append(Step("trim-mlp", "near", says, units))
            else:
                says = f"add {after.mlp_dim - before.mlp_dim} MLP units with zero output"
                of_stage.append(Step("widen-mlp", "exact", says, units))
        for step in of_stage:
            where = {"says": f"stage {number}: {step.says}", "settings": {"stage": number, **step.settings}}
            steps.append(replace(step, **where) if len(stages) > 1 else step)
    kinds = {step.exactness for step in steps}
    if "fresh" in kinds and LAYERS[method.layers]:
        raise UsageError(
            f"--method {method.layers} needs heads that have learned something, and here q, k, v start afresh."
        )
    needs_healing = calibrated and "near" in kinds and "fresh" not in kinds
    if needs_healing and method.refits:
        steps.append(HEAL)
    if needs_healing and method.grows:
        # Short stages that keep their layers and have all their heads split.
        divided = [
            after.head_dim < before.head_dim and after.depth == before.depth <= SHORT for before, after in stages
        ]
        steps += [LOCAL] if any(step.name == "drop-layers" for step in steps) else []
        steps += [TOGETHER] if init == "transfer" and any(divided) else []
    if method.balance:
        steps.append(balance_heads(source))
    return tuple(steps)


def change_heads(
    before: Stage, after: Stage, more: str = "add", *, calibrated: bool = False, by: str | None = None
) -> Step:
    """Return the step that adds, splits or trims heads of the same size; `by` describes what chooses the heads to keep.
    Raises `UsageError` if heads cannot be split into whole children.
    """
    settings = {"before": before.heads, "after": after.heads, "head_dim": after.head_dim, "kv_heads": after.kv_heads}
    if after.heads < before.heads:
        by = by or ("of most use on the calibration data" if calibrated else "with the largest output projection")
        return Step("trim-heads", "near", f"keep the {plural(after.heads, 'head')} {by}", settings)
    shared = "" if before.kv_heads == before.heads else f" the {before.kv_heads} key/value heads stay"
    if more != "split":
        says = f"add {plural(after.heads - before.heads, 'head')} of {after.head_dim} with zero output columns"
        return Step("add-heads", "exact", f"{says},{shared}" if shared else says, settings)
    children = after.heads // before.heads
    if after.heads % before.heads:
        near = nearest_divisible(after.heads, before.heads)
        raise UsageError(f"{before.heads} heads cannot be split into {after.heads}; nearest: {near}.", "Or add heads.")
    if children > before.head_dim:
        raise UsageError(f"A head of size {before.head_dim} cannot be split into {children}.")
    says = f"split every head into {children}, which share its output columns"
    return Step("split-heads", "exact", f"{says};{shared}" if shared else says, settings)


def resize_heads(source: Source, before: Stage, after: Stage, init: str, method: Method, calibrated: bool) -> Step:
    """Return the step that changes the size of heads: by splitting them, or by fresh initialization. Raises
    `UsageError` if that would lose what the heads have learned without the user's consent.
    """
    old, new = f"{before.heads} heads of {before.head_dim}", f"{after.heads} of {after.head_dim}"
    pair = f"{old} cannot become {new}"
    settings = {"before": [before.heads, before.head_dim], "after": [after.heads, after.head_dim]}
    if init == "fresh-attention" or not source.learned:
        return Step("fresh-attention", "fresh", f"start q, k, v afresh: {pair} by copying", settings)
    afresh = "--init fresh-attention starts q, k, v afresh, --init fresh the whole model (the paper's way)."
    if after.heads % before.heads:
        near = nearest_divisible(after.heads, before.heads)
        keep = "--head-dim keep adds or trims heads of the same size. " if keeps_size(source) else ""
        raise UsageError(f"{pair} by splitting; possible: {near} heads.", keep + afresh)
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
    shrinks = after.head_dim < before.head_dim
    if shrinks and not (calibrated or method.uncalibrated):
        raise UsageError(
            f"{pair} without sample data: the weights alone do not say which part of a head's scores matters.",
            f"Add --calibrate DATA; or accept less with --uncalibrated. {afresh}",
        )
    says = f"{old} become {new}"
    if shrinks:
        by = "fitted to the calibration data" if calibrated else "from the weights alone"
        return Step("split-heads", "near", f"{says}, {by}", settings | {"calibrated": calibrated})
    says += ", each with the scores of its parent"
    entries, roles = source.weights.entries, ("q", "k", "qk", "qkv")
    if any(entries[s.name].dtype not in ("F32", "F64") for s in source.specs if s.role in roles):
        # q and k are rescaled, which rounds in these dtypes
        return Step("split-heads", "near", f"{says}, rounded to the weights' precision", settings)
    return Step("split-heads", "exact", says, settings)


def keeps_size(source: Source) -> bool:
    """Return whether some family can hold another number of heads of the same size."""
    return source.architecture.stores_head_dim or source.architecture.decoupled is not None


def balance_heads(source: Source) -> Step:
    """Return the step that changes the basis of every head (see `balance`). Raises `UnsupportedModel` if heads have no
    bases of their own, or if the weights' dtype is too coarse to keep the function.
    """
    if reason := canonical.why_unsupported(source):
        raise UnsupportedModel(f"--balance: {reason}", "Leave --balance out.")
    if "vo" not in source.architecture.bases:
        raise UnsupportedModel(
            f"--balance: {source.architecture.name} was not shown to compute the same with values in another basis.",
            "Leave --balance out.",
        )
    coarse = {source.weights.entries[s.name].dtype for s in canonical.of_attention(source.specs)} - {"F32", "F64"}
    if coarse:
        raise UnsupportedModel(
            f"--balance is exact in fp32, and these weights are {', '.join(sorted(coarse))}: rounding them in another "
            "basis would change the function.",
            "Leave --balance out, or save an fp32 copy first.",
        )
    why = balance.why_not_scores(source)
    also = f"; queries and keys keep theirs ({why})" if why else ", and of queries and keys"
    says = f"another basis for values and outputs of every head, as well conditioned as can be{also}"
    return Step("balance", "exact", says, {"scores": why is None})
