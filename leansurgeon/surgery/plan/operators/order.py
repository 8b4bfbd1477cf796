"""Which operators lead from one shape to another, in the order in which they are applied."""

from __future__ import annotations

from dataclasses import replace

from leansurgeon.checkpoints.recorded.planned import Step
from leansurgeon.checkpoints.reshaped import Reshaped
from leansurgeon.errors import UsageError
from leansurgeon.shape import Stage
from leansurgeon.surgery.plan.method import LAYERS, Method
from leansurgeon.surgery.plan.operators import balance, drop_layers, fresh, heads, mlp
from leansurgeon.surgery.plan.operators.drop_layers import Choice
from leansurgeon.surgery.plan.operators.head_dim import check_children, other_head_dim

LOCAL = Step(
    "fit-locally", "near", "fit the blocks around every cut together, in a span that grows while the guard gains"
)
TOGETHER = Step(
    "fit-locally",
    "near",
    "fit blocks whose heads were divided together, in a span that grows while the guard gains",
)
SHORT = 8  # layers of a stage that are fitted together at most
HEAL = Step("heal", "near", "refit output projections on sample data; each is kept where guard samples gain")


def operators(
    target: Reshaped, init: str, choice: Choice, method: Method, calibrated: bool, heads_by: str | None = None
) -> tuple[Step, ...]:
    """The steps from the source to the target, in the order in which they are applied."""
    source = target.source
    if method.balance and init == "fresh":
        raise UsageError(
            f"--balance keeps what a model computes, and --init {init} forgets it.", "Leave --balance out."
        )
    if init == "fresh":
        return (fresh.model_operator(preset=source.weights is None),)
    steps: list[Step] = []
    stages = list(zip(source.shape.stages, target.shape.stages, strict=True))
    for number, ((before, after), span) in enumerate(zip(stages, source.shape.spans, strict=True), 1):
        of_stage = []
        if after.depth < before.depth:
            here = tuple(i - span.start for i in choice.kept if i in span)
            of_stage.append(drop_layers.operator(before.depth, here, choice))
        if after.head_dim != before.head_dim:
            of_stage.append(other_head_dim(source, before, after, init, method, calibrated))
        elif after.heads != before.heads:
            if after.heads > before.heads and method.more == "split":
                check_children(source)
            of_stage.append(heads.operator(before, after, method.more, calibrated=calibrated, by=heads_by))
        if after.mlp_dim != before.mlp_dim:
            of_stage.append(mlp.operator(before.mlp_dim, after.mlp_dim, calibrated=calibrated))
        steps += [of_several(number, step) for step in of_stage] if len(stages) > 1 else of_stage
    kinds = {step.exactness for step in steps}
    if "fresh" in kinds and LAYERS[method.layers]:
        raise UsageError(
            f"--method {method.layers} needs heads that have learned something, and here q, k, v start afresh."
        )
    needs_healing = calibrated and "near" in kinds and "fresh" not in kinds
    if needs_healing and method.heal != "none":
        steps.append(HEAL)
    if needs_healing and method.heal == "local":
        steps += [LOCAL] if any(step.name == "drop-layers" for step in steps) else []
        steps += [TOGETHER] if init == "transfer" and any(divided_in_full(*pair) for pair in stages) else []
    if method.balance:
        steps.append(balance.operator(source))
    return tuple(steps)


def of_several(number: int, step: Step) -> Step:
    """The same step, said of one stage of several (counted from 1)."""
    return replace(step, says=f"stage {number}: {step.says}", settings={"stage": number, **step.settings})


def divided_in_full(before: Stage, after: Stage) -> bool:
    """Whether a stage keeps its layers, has all their heads divided, and is short enough to be fitted as one."""
    return after.head_dim < before.head_dim and after.depth == before.depth <= SHORT
